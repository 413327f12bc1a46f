"""Finds stop strings in a stream of text, independent of its chunks."""

from collections.abc import Sequence


class StopStrings:
    """Passes text on up to the first stop string. The stop string itself and all later text are dropped.

    The result does not depend on the chunks. The stop string that is completed first counts, because generation ends
    there; of several completed by the same character, the longest counts. Only text that may be the beginning of a stop
    string is held back. Each stop string has its own automaton (Knuth, Morris and Pratt 1977), so a character costs
    amortised constant time per stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises: ValueError for an empty stop string."""
        if "" in stops:
            raise ValueError("a stop string is empty")
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self.found: str | None = None
        """The stop string that ended the text."""
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text to pass on, and whether a stop string has ended it. After that, all text is dropped."""
        if self.found is not None:
            return "", True
        if not self._matchers:
            return text, False
        text, num_held = self._held + text, len(self._held)
        for index in range(num_held, len(text)):
            complete = [matcher.stop for matcher in self._matchers if matcher.push(text[index])]
            if complete:
                self._held, self.found = "", max(complete, key=len)
                return text[: index + 1 - len(self.found)], True
        num_safe = len(text) - max(matcher.matched for matcher in self._matchers)
        self._held = text[num_safe:]
        return text[:num_safe], False

    def finish(self) -> str:
        """No more text comes, so return the text that was held back. Empty after a stop string."""
        text, self._held = self._held, ""
        return text


class _Matcher:
    """Matches one stop string. The end of the text matches its first ``matched`` characters, always fewer than all."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._borders = [0] * len(stop)  # of each prefix, the longest proper prefix that is also its suffix
        border = 0
        for index in range(1, len(stop)):
            while border and stop[index] != stop[border]:
                border = self._borders[border - 1]
            if stop[index] == stop[border]:
                border += 1
            self._borders[index] = border

    def push(self, character: str) -> bool:
        """Whether the stop string ends with this character."""
        while self.matched and self.stop[self.matched] != character:
            self.matched = self._borders[self.matched - 1]
        if self.stop[self.matched] == character:
            self.matched += 1
        if self.matched == len(self.stop):
            self.matched = self._borders[-1]
            return True
        return False
