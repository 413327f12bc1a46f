"""Splits a model's thoughts from its answer: ``<think>...</think>``, before everything else."""

from actorserve.http.chat.deltas import OutputParser, ReasoningDelta
from actorserve.http.chat.text_reader import Reading, TextReader

BEGIN = "<think>"
END = "</think>"


class Thoughts(TextReader):
    """An ``OutputParser`` that hands the text behind the thoughts to the parser of the answer.

    White space at the borders of the thoughts is dropped: templates put it there themselves.
    """

    def __init__(self, answer: OutputParser, *, begun: bool) -> None:
        """``begun``: the text begins inside the thoughts."""
        self._answer = answer
        self._begun = begun
        super().__init__()

    @property
    def has_tool_calls(self) -> bool:
        return self._answer.has_tool_calls

    @property
    def is_complete(self) -> bool:
        return self._answer.is_complete

    def _read(self) -> Reading[None]:
        if self._begun or (yield from self._begins()):
            yield from self._peek()
            self._held.clear()
            if not (yield from self._text_until(END, kind=ReasoningDelta)):
                self._give_held(ReasoningDelta)
            self._held.clear()
            yield from self._peek()
            self._held.clear()
        self._unread = "".join(self._held) + self._unread
        self._held.clear()
        while True:
            self._deltas += self._answer.push(self._unread)
            self._unread = ""
            if not (yield from self._more()):
                break
        self._deltas += self._answer.finish()

    def _begins(self) -> Reading[bool]:
        """Whether the text begins with the marker, which is held then."""
        yield from self._peek()
        while BEGIN.startswith(self._unread) and self._unread != BEGIN and (yield from self._more()):
            pass
        begins = self._unread.startswith(BEGIN)
        self._hold(len(BEGIN) if begins else 0)
        return begins
