"""Finds the end of a JSON value in a stream of text."""

import re

_SPACE = " \t\r\n"
_IN_STRING = re.compile(r'[^"\\]*')
_IN_BRACKETS = re.compile(r'[^"{}\[\]<]*')


class JsonValue:
    """A string, an object or an array. Only strings and brackets are understood, and that is enough to find its end.

    ``broken`` is set by a ``<`` outside of strings. No JSON has it there, but the marker after a call that the model
    has left unfinished begins with it.
    """

    def __init__(self) -> None:
        self.complete = False
        self.broken = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, text: str, start: int = 0) -> int:
        """Read ``text`` from ``start``. Returns where the value ends, or the text, if it goes on."""
        position = start
        while position < len(text):
            read = self._push_string if self._in_string else self._push_brackets
            position = read(text, position)
            if self.complete or self.broken:
                return position
        return position

    def _push_string(self, text: str, position: int) -> int:
        if self._escaped:
            self._escaped = False
            return position + 1
        end = _match_end(_IN_STRING, text, position)
        if end == len(text):
            return end
        if text[end] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.complete = self._depth == 0
        return end + 1

    def _push_brackets(self, text: str, position: int) -> int:
        end = _match_end(_IN_BRACKETS, text, position)
        if end == len(text):
            return end
        if text[end] == "<":
            self.broken = True
            return end
        if text[end] == '"':
            self._in_string = True
        else:
            self._depth += 1 if text[end] in "{[" else -1
            self.complete = self._depth <= 0
        return end + 1


def is_space(char: str) -> bool:
    """Whether JSON allows this character between its tokens."""
    return char in _SPACE


def _match_end(pattern: re.Pattern[str], text: str, position: int) -> int:
    found = pattern.match(text, position)
    assert found is not None  # both patterns match the empty string
    return found.end()
