"""Commands that other processes have to answer: who was asked, who has answered, and until when is waited."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from actorserve.core.messages import Answer, Column, Command, Outcome, Peer
from actorserve.core.operations.tables import joined, num_rows, text_column

PATIENCE_S: Final = 2.0
"""How long a process that was asked may take. A process that is silent for longer counts as dead soon, anyway."""


@dataclass(slots=True)
class Question:
    """A command that ``waits_for`` the answers of other processes. ``needs_all``: a process that refuses is reported,
    and otherwise one process that does what was asked is enough.
    """

    command: Command
    caller: Peer
    until_s: float
    needs_all: bool
    waits_for: dict[Peer, None]
    answers: list[tuple[Peer, Answer]] = field(default_factory=list)

    def answer(self) -> Answer:
        """The answer that the answers so far make together."""
        done = [answer for _, answer in self.answers if answer.outcome is Outcome.DONE]
        refused = [(peer, answer) for peer, answer in self.answers if answer.outcome is Outcome.REFUSED]
        silent = [f"{_name(peer)} has not answered" for peer in self.waits_for]
        if self.needs_all:
            texts = [f"{_name(peer)}: {answer.text}" for peer, answer in refused] + silent
            outcome = Outcome.DONE if done and not refused else Outcome.REFUSED
            texts = _once(answer.text for answer in done if answer.text) + texts
        elif done:
            outcome, texts = Outcome.DONE, _once(answer.text for answer in done)
        else:
            outcome = Outcome.REFUSED
            texts = _once(answer.text for _, answer in refused) + silent or ["no process could be asked"]
        return Answer(
            self.command.command_id,
            outcome,
            _short("; ".join(texts)),
            joined([self._table(*one) for one in self.answers]),
        )

    def _table(self, peer: Peer, answer: Answer) -> tuple[Column, ...]:
        """A process's table, with the process's name in a last column."""
        if not answer.columns:
            return ()
        return (*answer.columns, text_column("process", [_name(peer)] * num_rows(answer.columns)))


class Questions:
    """The commands that wait for answers, by id."""

    def __init__(self) -> None:
        self._open: dict[str, Question] = {}

    def __contains__(self, command_id: str) -> bool:
        return command_id in self._open

    def ask(self, command: Command, caller: Peer, peers: Iterable[Peer], now: float, *, needs_all: bool) -> Question:
        """Begin to wait for the answers of ``peers``."""
        question = Question(command, caller, now + PATIENCE_S, needs_all, dict.fromkeys(peers))
        self._open[command.command_id] = question
        return question

    def again(self, command_id: str, caller: Peer) -> None:
        """The command was repeated, maybe over another connection, which then gets the answer."""
        self._open[command_id].caller = caller

    def on_answer(self, answer: Answer, sender: Peer) -> bool:
        """False if no question waits for it."""
        question = self._open.get(answer.command_id)
        if question is None or sender not in question.waits_for:
            return False
        del question.waits_for[sender]
        question.answers.append((sender, answer))
        return True

    def on_down(self, peer: Peer) -> None:
        for question in self._open.values():
            if question.waits_for.pop(peer, peer) is None:
                down = Answer(question.command.command_id, Outcome.REFUSED, "it went down")
                question.answers.append((peer, down))

    def take_settled(self, now: float) -> list[Question]:
        """The questions whose last answer has come, or whose time is over. They are forgotten."""
        settled = [question for question in self._open.values() if not question.waits_for or now >= question.until_s]
        for question in settled:
            del self._open[question.command.command_id]
        return settled

    def next_deadline(self) -> float | None:
        return min((question.until_s for question in self._open.values()), default=None)


def _name(peer: Peer) -> str:
    """The process's name. The coordinator itself may be among those that are asked."""
    return peer.name or "the coordinator"


def _once(texts: Iterable[str]) -> list[str]:
    """The texts, each once."""
    return list(dict.fromkeys(text for text in texts if text))


def _short(text: str) -> str:
    return text if len(text) <= 250 else f"{text[:247]}..."
