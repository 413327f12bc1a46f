"""Verbs as one-shot commands: what they print, what they ask first, how they wait, and their exit codes."""

import io
import json
from collections.abc import Callable

import pytest

from actorserve.console.arguments import console_parser
from actorserve.console.outcome import Exit
from actorserve.console.run import Runner
from actorserve.console.session import Session
from actorserve.core.messages import Answer, Command, Outcome
from actorserve.core.operations.tables import integer_column, number_column, text_column
from tests.console.server import FakeServer, refusing, silent, workers

DEADLINE_S = "5"


def run(
    server: FakeServer, line: str, confirm: Callable[[str], bool] | None = None, width: int | None = None
) -> tuple[Exit, str]:
    """The exit code and the output of a command."""
    out = io.StringIO()
    runner = Runner(Session(server, 1.0), confirm, out, width)
    return runner.run(console_parser().parse_args(line.split())), out.getvalue()


def test_json_is_one_object_with_its_schema() -> None:
    """Unknown numbers are null, and every row has all columns."""

    def answer(command: Command) -> Answer:
        columns = text_column("worker", ["a"]), number_column("freeness", [float("nan")]), integer_column("n", [-1])
        return Answer(command.command_id, Outcome.DONE, "", columns)

    server = FakeServer(workers=answer)
    code, out = run(server, "workers --json")
    assert code is Exit.DONE
    assert json.loads(out) == {
        "schema": 1,
        "verb": "workers",
        "id": server.asked[0].command_id,
        "dry_run": False,
        "outcome": "done",
        "text": "",
        "rows": [{"worker": "a", "freeness": None, "n": -1}],
    }


def test_json_may_stand_before_the_verb() -> None:
    """It is the same as after it, and without either there is no JSON."""
    assert [run(FakeServer(), line)[1][:1] for line in ("--json status", "status --json", "status")] == ["{", "{", "d"]


def test_exit_codes_tell_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    """0 is done, 1 refused, 2 wrong usage, and 3 no answer; the last names the id with which to repeat an act."""
    assert run(FakeServer(), "cordon worker-0")[0] == 0
    assert run(FakeServer(cordon=refusing), "cordon worker-9")[0] == 1
    assert "refused: no such worker" in capsys.readouterr().err
    for line in ("cordon", "nonsense", "events --wait", "drain a --wait --wait-s 0", "workers --dry-run"):
        with pytest.raises(SystemExit) as caught:
            run(FakeServer(), line)
        assert caught.value.code == 2
    capsys.readouterr()
    server = FakeServer(cordon=silent)
    assert run(server, "cordon worker-0")[0] == 3
    assert f"repeat it with --id {server.asked[0].command_id}" in capsys.readouterr().err


def test_a_repeated_act_has_the_same_id_and_a_dry_run_says_so() -> None:
    """Both reach the server."""
    server = FakeServer()
    run(server, "cordon worker-0 --id abc")
    run(server, "cordon worker-0 --dry-run")
    assert server.asked[0] == Command("abc", "cordon", ("worker-0",))
    assert server.asked[1].dry_run


def test_what_destroys_asks_first() -> None:
    """Nobody to ask, or a no, sends nothing; a yes, --yes, or a dry run is sent."""
    server = FakeServer()
    assert run(server, "cancel r")[0] is Exit.REFUSED
    assert run(server, "cancel r", lambda question: False)[0] is Exit.REFUSED
    assert server.asked == []
    assert run(server, "cancel r", lambda question: question == "cancel r: are you sure? [y/N] ")[0] is Exit.DONE
    assert run(server, "cancel r --yes")[0] is Exit.DONE
    assert run(server, "cancel r --dry-run")[0] is Exit.DONE
    assert server.verbs == ["cancel"] * 3


def test_drain_waits_until_the_workers_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that does not answer meanwhile is asked again; a worker that is gone has no request."""
    monkeypatch.setattr("actorserve.console.session.POLL_S", 0.0)
    replies = [workers(("a", "emptying", 1)), silent, workers(("a", "empty", 1))]

    def answer(command: Command) -> Answer | None:
        return replies.pop(0)(command)

    server = FakeServer(workers=answer)
    assert run(server, f"drain a --wait --wait-s {DEADLINE_S}")[0] is Exit.DONE
    assert server.verbs == ["drain", "workers", "workers", "workers"]
    assert run(FakeServer(workers=workers(("a", "emptying", 1))), "drain a --wait --wait-s 0.01")[0] is Exit.TIMEOUT
    assert run(FakeServer(drain=refusing), "drain a --wait")[0] is Exit.REFUSED


def test_restart_waits_for_the_next_incarnation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is back once a later incarnation has reported."""
    monkeypatch.setattr("actorserve.console.session.POLL_S", 0.0)
    replies = [("a", "open", 1), ("a", "restarting", 1), None, ("a", "starting", 2), ("a", "cordoned", 2)]

    def answer(command: Command) -> Answer:
        row = replies.pop(0)
        return workers(*([row] if row else []))(command)

    server = FakeServer(workers=answer)
    assert run(server, f"restart a --yes --wait --wait-s {DEADLINE_S}")[0] is Exit.DONE
    assert replies == []


def test_events_are_followed_from_the_last_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only new events are printed, and the stream ends with 3 when the server is gone."""
    monkeypatch.setattr("actorserve.console.run.POLL_S", 0.0)
    replies = [[1, 2], [], [3]]

    def answer(command: Command) -> Answer | None:
        if not replies:
            return None
        return Answer(command.command_id, Outcome.DONE, "", (integer_column("number", replies.pop(0)),))

    server = FakeServer(events=answer)
    code, out = run(server, "events --follow --json")
    assert code is Exit.TIMEOUT
    assert [command.arguments for command in server.asked] == [(), ("2",), ("2",), ("3",)]
    assert [len(json.loads(line)["rows"]) for line in out.splitlines()] == [2, 1]


def test_tables_are_readable_and_show_no_control_characters() -> None:
    """Bytes and times have units, an unknown number is a dash, and nothing that a terminal would obey is printed."""

    def answer(command: Command) -> Answer:
        columns = (
            text_column("worker", ["a\x1b[31m[red]"]),
            integer_column("kv_used_bytes", [3 * 2**30]),
            number_column("age_s", [90.0]),
            number_column("freeness", [float("nan")]),
            text_column("kind", ["hidden"]),
        )
        return Answer(command.command_id, Outcome.DONE, "", columns)

    _, out = run(FakeServer(workers=answer), "workers")
    header, row = out.splitlines()
    assert header.split() == ["worker", "kv", "used", "age", "freeness"]
    assert row.split() == ["a\N{REPLACEMENT CHARACTER}[31m[red]", "3.0", "GiB", "1", "min", "30", "s", "-"]
