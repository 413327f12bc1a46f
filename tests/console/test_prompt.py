"""The prompt: completion, help, and lines that are wrong."""

import io

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from actorserve.console.help import help_text
from actorserve.console.outcome import Exit
from actorserve.console.prompt import Names, VerbCompleter, run_line
from actorserve.console.run import Runner
from actorserve.console.session import Session
from actorserve.core.operations.verbs import VERBS, Kind
from tests.console.server import FakeServer, workers


def completions(line: str, completer: VerbCompleter) -> list[str]:
    return [found.text for found in completer.get_completions(Document(line), CompleteEvent())]


def runner(server: FakeServer) -> Runner:
    return Runner(Session(server, 1.0), None, io.StringIO())


def test_verbs_and_arguments_are_completed() -> None:
    """The first word is a verb, and each further one what the verb's parameter is."""
    names = {Kind.WORKER: ["worker-0", "worker-1"], Kind.REQUEST: ["r1"], Kind.LEVEL: ["debug"]}
    completer = VerbCompleter(lambda kind: names.get(kind, []))
    assert completions("un", completer) == ["uncordon"]
    assert completions("migrate ", completer) == ["r1"]
    assert completions("migrate r1 worker-", completer) == ["worker-0", "worker-1"]
    assert completions("log-level d", completer) == ["debug"]
    assert completions("help dr", completer) == ["drain"]
    assert completions("nonsense x", completer) == []
    assert completions("cancel r1 ", completer) == []


def test_names_are_asked_once_for_a_while() -> None:
    """Two completions in a row ask the server once, and a server that is gone offers nothing."""
    server = FakeServer(workers=workers(("worker-0", "open", 1)))
    names = Names(Session(server, 1.0))
    assert names.of(Kind.WORKER) == names.of(Kind.WORKER) == ["worker-0"]
    assert server.verbs == ["workers"]
    assert Names(Session(FakeServer(requests=lambda command: None), 1.0)).of(Kind.REQUEST) == []


def test_help_lists_every_verb() -> None:
    """A verb's own help has its parameters, and an unknown verb gets the nearest one."""
    assert all(f"  {verb.name} " in help_text() for verb in VERBS.values())
    assert help_text(["migrate"]).startswith("migrate REQUEST WORKER")
    assert help_text(["migrat"]) == "there is no verb migrat; did you mean migrate?"


def test_wrong_lines_do_not_end_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong verb, missing arguments and an open quote print why, and send nothing."""
    server = FakeServer()
    for line in ("workes", "cordon", "cordon 'x", "events --nonsense", "workers -h"):
        assert run_line(runner(server), line) is Exit.USAGE
        assert capsys.readouterr().err
    assert run_line(runner(server), "") is Exit.DONE
    assert run_line(runner(server), "help") is Exit.DONE
    assert server.asked == []
    assert run_line(runner(server), "cordon worker-0 --dry-run") is Exit.DONE
    assert server.verbs == ["cordon"]
