"""Finds stop strings in a stream of text, wherever it is cut into chunks."""

from collections.abc import Sequence


class StopStrings:
    """Passes text on until a stop string appears, which is not passed on, nor is anything after it.

    The result does not depend on the chunks. The stop string that is complete first wins, for generation ends there; of
    those complete at the same character, the longest. Held back is only what may still be the beginning of a stop
    string. Each has an automaton of its own (Knuth, Morris and Pratt 1977): a character costs amortised constant time
    per stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises: ValueError for an empty stop string."""
        if "" in stops:
            raise ValueError("a stop string is empty")
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Text to pass on, and whether a stop string ended it. After that nothing more is passed on."""
        if self._stopped or not self._matchers:
            return "" if self._stopped else text, self._stopped
        text, num_held = self._held + text, len(self._held)
        for index in range(num_held, len(text)):
            complete = [len(matcher.stop) for matcher in self._matchers if matcher.push(text[index])]
            if complete:
                self._held, self._stopped = "", True
                return text[: index + 1 - max(complete)], True
        num_safe = len(text) - max(matcher.matched for matcher in self._matchers)
        self._held = text[num_safe:]
        return text[:num_safe], False

    def finish(self) -> str:
        """No more text comes: what was held back was no stop string. Nothing, once stopped."""
        text, self._held = self._held, ""
        return text


class _Matcher:
    """How much of one stop string the text's end matches: ``matched`` characters, less than all of them."""

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
