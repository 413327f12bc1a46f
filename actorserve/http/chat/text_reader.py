"""Reads a model's text for markers such as ``<think>``, however the text is split into pieces."""

import re
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import TypeVar

from actorserve.http.chat.deltas import Delta, ReasoningDelta, TextDelta

_SPACE = " \t\r\n"

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A part of the reading. It yields to wait for more text."""


class TextReader(ABC):
    """An ``OutputParser`` that is written as if the whole text were there.

    ``_read`` takes the text from ``_unread``, and ``_more`` waits. So the result does not depend on the pieces.
    ``_held`` is text that was read but may turn out to be markup, which is not given to the client: white space, and
    markers. It goes out with the next text.
    """

    def __init__(self) -> None:
        self._unread = ""
        self._held: list[str] = []
        self._deltas: list[Delta] = []
        self._ended = False
        self._reading = self._read()

    def push(self, text: str) -> list[Delta]:
        self._unread += text
        return self._go_on()

    def finish(self) -> list[Delta]:
        self._ended = True
        return self._go_on()

    @abstractmethod
    def _read(self) -> Reading[None]:
        """Read until there is no more text."""

    def _more(self) -> Reading[bool]:
        """Wait for more text. False if there is none."""
        if not self._ended:
            yield
            return True
        return False

    def _peek(self) -> Reading[str]:
        """Hold white space, and return the character behind it. Empty at the end."""
        while True:
            stripped = self._unread.lstrip(_SPACE)
            self._hold(len(self._unread) - len(stripped))
            if stripped:
                return stripped[0]
            if not (yield from self._more()):
                return ""

    def _hold(self, num_chars: int) -> None:
        """Move characters from the unread text to the held text."""
        if num_chars:
            self._held.append(self._unread[:num_chars])
            self._unread = self._unread[num_chars:]

    def _text_until(self, *markers: str, kind: type[TextDelta | ReasoningDelta] = TextDelta) -> Reading[str]:
        """Give the text that precedes the first of ``markers``, hold the marker, and return it. Empty at the end."""
        pattern = re.compile("|".join(map(re.escape, markers)))
        while True:
            found = pattern.search(self._unread)
            if found is not None:
                self._give(found.start(), kind)
                self._hold(len(found[0]))
                return found[0]
            self._give(len(self._unread) - num_begun(self._unread, markers), kind)
            if not (yield from self._more()):
                self._give(len(self._unread), kind)
                return ""

    def _give(self, num_chars: int, kind: type[TextDelta | ReasoningDelta] = TextDelta) -> None:
        """Give unread characters to the client, and hold the white space at their end."""
        stripped = self._unread[:num_chars].rstrip(_SPACE)
        if stripped:
            self._held.append(stripped)
            self._give_held(kind)
            self._unread = self._unread[len(stripped) :]
        self._hold(num_chars - len(stripped))

    def _give_held(self, kind: type[TextDelta | ReasoningDelta] = TextDelta) -> None:
        text = "".join(self._held)
        self._held.clear()
        if text:
            self._deltas.append(kind(text))

    def _go_on(self) -> list[Delta]:
        next(self._reading, None)
        deltas, self._deltas = self._deltas, []
        return deltas


def num_begun(text: str, markers: tuple[str, ...]) -> int:
    """How many characters at the end of ``text`` may be the beginning of a marker. ``text`` contains no marker."""
    longest = 0
    for marker in markers:
        start = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while start >= 0:
            if marker.startswith(text[start:]):
                longest = max(longest, len(text) - start)
                break
            start = text.find(marker[0], start + 1)
    return longest
