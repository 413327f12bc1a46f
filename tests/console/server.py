"""A server for consoles in tests: it answers from a table, and remembers what it was asked."""

from collections.abc import Callable

from actorserve.core.messages import Answer, Command, Outcome
from actorserve.core.operations.tables import integer_column, text_column

Reply = Answer | None


class FakeServer:
    """Answers each verb as the test says; a verb without an answer is done."""

    address = "ipc:///fake"

    def __init__(self, **answers: Callable[[Command], Reply]) -> None:
        self.asked: list[Command] = []
        self.answers = answers

    def ask(self, command: Command, timeout_s: float) -> Reply:
        self.asked.append(command)
        reply = self.answers.get(command.verb.replace("-", "_"))
        return Answer(command.command_id, Outcome.DONE, "done") if reply is None else reply(command)

    @property
    def verbs(self) -> list[str]:
        return [command.verb for command in self.asked]


def workers(*rows: tuple[str, str, int]) -> Callable[[Command], Answer]:
    """Workers by name, state and incarnation."""

    def answer(command: Command) -> Answer:
        columns = (
            text_column("worker", [name for name, _, _ in rows]),
            text_column("state", [state for _, state, _ in rows]),
            integer_column("incarnation", [incarnation for _, _, incarnation in rows]),
        )
        return Answer(command.command_id, Outcome.DONE, "", columns)

    return answer


def silent(command: Command) -> None:
    """No answer."""


def refusing(command: Command) -> Answer:
    return Answer(command.command_id, Outcome.REFUSED, "no such worker")
