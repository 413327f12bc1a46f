"""One console's conversation with a server: commands, answers, and waiting for what takes longer than an answer."""

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from actorserve.console.outcome import as_objects
from actorserve.core.messages import Answer, Command, Outcome

POLL_S: Final = 0.25


class Asker(Protocol):
    """A connection to the server (``wire.console.ConsoleClient``)."""

    @property
    def address(self) -> str: ...

    def ask(self, command: Command, timeout_s: float) -> Answer | None: ...


class Session:
    """Asks the server, and gives up after ``timeout_s`` without an answer."""

    def __init__(self, asker: Asker, timeout_s: float) -> None:
        self.asker = asker
        self.timeout_s = timeout_s

    def command(
        self, verb: str, arguments: Sequence[str] = (), *, dry_run: bool = False, command_id: str | None = None
    ) -> Command:
        """A command with an id of its own, or with the id of the command that it repeats."""
        return Command(command_id or secrets.token_hex(8), verb, tuple(arguments), dry_run)

    def ask(self, command: Command) -> Answer | None:
        """None if no answer came in time."""
        return self.asker.ask(command, self.timeout_s)

    def read(self, verb: str, *arguments: str) -> Answer | None:
        """Ask a question of its own."""
        return self.ask(self.command(verb, arguments))

    def states(self, target: str) -> dict[str, tuple[str, int]] | None:
        """The state and the incarnation of each worker that ``target`` names; None without an answer."""
        answer = self.read("workers", target)
        if answer is None:
            return None
        if answer.outcome is not Outcome.DONE:
            return {}
        return {row["worker"]: (row["state"], row["incarnation"]) for row in as_objects(answer)}

    def wait_until(self, is_over: Callable[[], bool], wait_s: float) -> bool:
        """Look again and again whether it is over. False if it takes longer than ``wait_s``."""
        until_s = time.monotonic() + wait_s
        while not is_over():
            if time.monotonic() >= until_s:
                return False
            time.sleep(POLL_S)
        return True

    def is_drained(self, target: str) -> bool:
        """Whether no worker that ``target`` names has a request any more. A worker that is gone has none."""
        states = self.states(target)
        return states is not None and all(state in ("empty", "starting") for state, _ in states.values())

    def has_restarted(self, name: str, before: int) -> bool:
        """Whether the worker is back as a later incarnation, and has reported."""
        states = self.states(name)
        state, incarnation = ("", before) if not states else states.get(name, ("", before))
        return incarnation > before and state not in ("", "starting")
