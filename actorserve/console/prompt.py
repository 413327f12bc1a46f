"""The prompt: verbs line by line, with completion, history and help."""

import os
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from actorserve.console.arguments import UsageError, line_parser
from actorserve.console.help import help_text
from actorserve.console.outcome import Exit, as_objects
from actorserve.console.run import Runner
from actorserve.console.session import Session
from actorserve.core.operations.verbs import LOG_LEVELS, VERBS, Kind

_FRESH_S: Final = 2.0  # how long names may be offered without asking the server again
_WORDS: Final = ("help", "exit", "quit")


class Names:
    """What arguments may be: the names that the server knows, asked at most once in ``_FRESH_S``."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: dict[str, tuple[float, list[str]]] = {}

    def of(self, kind: Kind) -> list[str]:
        match kind:
            case Kind.WORKER | Kind.PROCESS:
                return self._column("workers", "worker")
            case Kind.TARGET:
                return [*self._column("workers", "worker"), *self._column("hosts", "host")]
            case Kind.REQUEST:
                return self._column("requests", "request")
            case Kind.SETTING:
                return self._column("config", "name")
            case Kind.LEVEL:
                return list(LOG_LEVELS)
            case Kind.SIZE:
                return ["auto"]
            case _:
                return []

    def _column(self, verb: str, name: str) -> list[str]:
        at, names = self._known.get(verb, (-_FRESH_S, []))
        if time.monotonic() - at >= _FRESH_S:
            answer = self._session.read(verb)
            names = [] if answer is None else [row[name] for row in as_objects(answer)]
            self._known[verb] = time.monotonic(), names
        return names


class VerbCompleter(Completer):
    """Completes verbs, and then each argument by its kind."""

    def __init__(self, names: Callable[[Kind], Sequence[str]]) -> None:
        self._names = names

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        before = document.text_before_cursor
        words = before.split()
        current = "" if not words or before[-1:].isspace() else words.pop()
        for candidate in self.candidates(words):
            if candidate.startswith(current):
                yield Completion(candidate, start_position=-len(current))

    def candidates(self, words: Sequence[str]) -> list[str]:
        """What may follow these words."""
        if not words or words == ["help"]:
            return [*VERBS, *(() if words else _WORDS)]
        verb = VERBS.get(words[0])
        if verb is None:
            return []
        num_given = sum(not word.startswith("-") for word in words[1:])
        if num_given < len(verb.parameters):
            return list(self._names(verb.parameters[num_given].kind))
        return []


def read_lines(runner: Runner) -> Exit:
    """Read and run lines until Ctrl-D or ``exit``."""
    names = Names(runner.session)
    prompt: PromptSession[str] = PromptSession(
        "actorserve> ", completer=VerbCompleter(names.of), complete_while_typing=False, history=_history()
    )
    while True:
        try:
            line = prompt.prompt()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return Exit.DONE
        if line.strip() in ("exit", "quit"):
            return Exit.DONE
        run_line(runner, line)


def run_line(runner: Runner, line: str) -> Exit:
    """Run one line. A wrong line prints why, and Ctrl-C ends what it does."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        runner.say(str(error))
        return Exit.USAGE
    if not words:
        return Exit.DONE
    if words[0] in ("help", "?"):
        runner.say(help_text(words[1:]))
        return Exit.DONE
    if words[0] not in VERBS:
        runner.say(help_text(words[:1]))
        return Exit.USAGE
    try:
        return runner.run(line_parser().parse_args(words))
    except UsageError as error:
        runner.say(str(error))
        return Exit.USAGE
    except KeyboardInterrupt:
        return Exit.DONE


def _history() -> History:
    """The lines of earlier consoles, in the user's state folder; only this console's if it cannot be written."""
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    folder = home / "actorserve"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = folder / "console_history"
        file.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(file))
