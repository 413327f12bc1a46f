"""Runs one verb: asks first if it destroys something, sends it, waits if that is wanted, and prints the answer."""

import argparse
import sys
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console

from actorserve.console.arguments import arguments_of
from actorserve.console.outcome import Exit, as_json
from actorserve.console.session import POLL_S, Session
from actorserve.console.tables import plain, table_of
from actorserve.console.top import TokenRates, picture, watch
from actorserve.core.messages import Answer, Command, Outcome
from actorserve.core.operations.tables import num_rows
from actorserve.core.operations.verbs import VERBS

_FILE_WIDTH = 500  # so that no line of a file or a pipe is folded


class Runner:
    """Runs verbs in a session, and prints to ``out``. ``confirm`` asks the operator; None without a terminal."""

    def __init__(
        self,
        session: Session,
        confirm: Callable[[str], bool] | None,
        out: TextIO | None = None,
        width: int | None = None,
    ) -> None:
        self.session = session
        self._confirm = confirm
        self._out = out or sys.stdout
        self._console = Console(file=self._out, width=width, highlight=False)
        if width is None and not self._console.is_terminal:
            self._console.width = _FILE_WIDTH

    def run(self, parsed: argparse.Namespace) -> Exit:
        """Run what was parsed (``console.arguments``)."""
        verb = VERBS[parsed.verb]
        dry_run = verb.acts and parsed.dry_run
        command_id = parsed.id if verb.acts else None
        command = self.session.command(verb.name, arguments_of(parsed), dry_run=dry_run, command_id=command_id)
        if verb.destroys and not dry_run and not parsed.yes and not self._is_confirmed(command):
            return Exit.REFUSED
        if verb.name == "top" and not parsed.json and not parsed.once and self._console.is_terminal:
            return watch(self.session, self._console, parsed.interval, parsed.sort)
        before = self._incarnation(command) if verb.name == "restart" and parsed.wait else 0
        answer = self.session.ask(command)
        code = self._print(command, answer, as_objects=parsed.json)
        if code is not Exit.DONE or answer is None or dry_run:
            return code
        target = command.arguments[0] if command.arguments else ""
        if verb.name == "drain" and parsed.wait:
            return self._wait(lambda: self.session.is_drained(target), parsed.wait_s, "is drained", target)
        if verb.name == "restart" and parsed.wait:
            return self._wait(lambda: self.session.has_restarted(target, before), parsed.wait_s, "is back", target)
        if verb.name == "events" and parsed.follow:
            return self._follow(answer, as_objects=parsed.json)
        return code

    def say(self, text: str) -> None:
        """A line for a person on stderr."""
        print(plain(text), file=sys.stderr)

    def _is_confirmed(self, command: Command) -> bool:
        if self._confirm is None:
            self.say(f"{command.verb} asks before it acts, and there is no terminal here: use --yes")
            return False
        return self._confirm(f"{' '.join((command.verb, *command.arguments))}: are you sure? [y/N] ")

    def _print(self, command: Command, answer: Answer | None, *, as_objects: bool) -> Exit:
        if answer is None:
            again = f"; repeat it with --id {command.command_id}" if VERBS[command.verb].acts else ""
            address = self.session.asker.address
            maybe = "; it may not accept your key" if address.startswith("tcp://") else ""
            self.say(f"no answer from {address} in {self.session.timeout_s:g} s{maybe}{again}")
            return Exit.TIMEOUT
        if as_objects:
            print(as_json(command, answer), file=self._out, flush=True)
        else:
            self._print_table(command, answer)
        return Exit.DONE if answer.outcome is Outcome.DONE else Exit.REFUSED

    def _print_table(self, command: Command, answer: Answer) -> None:
        if answer.outcome is not Outcome.DONE:
            self.say(f"refused: {answer.text}")
        elif answer.text:
            self._console.print(plain(answer.text), markup=False)
        if num_rows(answer.columns):
            is_top = command.verb == "top"
            shown = picture(answer, TokenRates(), 0.0, _FILE_WIDTH * 10, "worker") if is_top else None
            self._console.print(shown or table_of(command.verb, answer.columns))
        elif answer.columns:
            self.say("nothing to show")

    def _incarnation(self, command: Command) -> int:
        states = self.session.states(command.arguments[0]) or {}
        return states.get(command.arguments[0], ("", 0))[1]

    def _wait(self, is_over: Callable[[], bool], wait_s: float, what: str, target: str) -> Exit:
        if not self.session.wait_until(is_over, wait_s):
            self.say(f"{target}: after {wait_s:g} s it is not yet so that it {what}")
            return Exit.TIMEOUT
        self.say(f"{target} {what}")
        return Exit.DONE

    def _follow(self, answer: Answer, *, as_objects: bool) -> Exit:
        """Print new events until Ctrl-C. The coordinator keeps the events, so a slow reader holds nothing up."""
        last = _last_number(answer, 0)
        while True:
            time.sleep(POLL_S)
            command = self.session.command("events", (str(last),))
            newer = self.session.ask(command)
            if newer is None:
                return self._print(command, None, as_objects=as_objects)
            if num_rows(newer.columns):
                self._print(command, newer, as_objects=as_objects)
            last = _last_number(newer, last)


def _last_number(answer: Answer, otherwise: int) -> int:
    numbers = next((column.integers for column in answer.columns if column.name == "number"), ())
    return numbers[-1] if numbers else otherwise
