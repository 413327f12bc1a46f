"""Reads a tool call that a model writes as a JSON object, while it writes it."""

from collections.abc import Collection
from enum import Enum, auto
from json import loads

from actorserve.http.chat.tools.json_value import JsonValue, is_space

_ARGUMENTS_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("type", "id")  # models write them beside the name, and they do not matter


class _Next(Enum):
    """What comes next in the object."""

    OBJECT = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()


class CallObject:
    """``{"name": NAME, "arguments": OBJECT}``, with the keys in any order; Llama writes ``parameters``.

    The object is a call as soon as its name is known and its arguments begin. Until then any deviation refuses it, so
    that text that only looks like a call is not held for long. From then on the object ends with the arguments, at the
    latest.
    """

    def __init__(self, known_names: Collection[str] | None = None) -> None:
        """With ``known_names``, an object with another name is refused."""
        self.name = ""
        self.ended = False
        """Whether the object has ended, or was refused."""
        self._read: list[str] = []  # all that was read, until the object is a call
        self._known_names = known_names
        self._next = _Next.OBJECT
        self._key = ""
        self._value: JsonValue | None = None
        self._parts: list[str] = []  # of the value that is being read
        self._has_arguments = False
        self._arguments: list[str] = []  # not taken yet

    @property
    def is_call(self) -> bool:
        return bool(self.name) and self._has_arguments

    @property
    def text(self) -> str:
        """All that was read, until the object is a call."""
        return "".join(self._read)

    def push(self, text: str) -> str:
        """Read ``text``. Returns the part behind the object; empty while the object goes on."""
        position = 0
        while position < len(text) and not self.ended:
            position = self._read_token(text, position) if self._value is None else self._read_value(text, position)
        if self.is_call:
            self._read.clear()
        else:
            self._read.append(text[:position])
        return text[position:]

    def take_arguments(self) -> str:
        """The arguments that were read since the last time; empty until the object is a call."""
        if not self.is_call:
            return ""
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def _read_token(self, text: str, position: int) -> int:
        """Read one character between values. A character that may not be there ends the object, and stays unread."""
        char = text[position]
        if is_space(char):
            return position + 1
        match self._next, char:
            case _Next.OBJECT, "{":
                self._next = _Next.KEY
            case _Next.KEY, '"':
                self._value = JsonValue()
                return position
            case _Next.COLON, ":":
                self._next = _Next.VALUE
            case _Next.VALUE, '"' | "{" if self._may_begin(char):
                self._value = JsonValue()
                return position
            case _Next.COMMA, ",":
                self._next = _Next.KEY
            case _Next.COMMA, "}":
                self.ended = True
            case _:
                self.ended = True
                return position
        return position + 1

    def _may_begin(self, char: str) -> bool:
        """Whether the current key's value may begin so."""
        if self._key in _ARGUMENTS_KEYS and not self._has_arguments:
            self._has_arguments = char == "{"
            return self._has_arguments
        return char == '"' and (self._key == "name" or self._key in _OTHER_KEYS)

    def _read_value(self, text: str, position: int) -> int:
        assert self._value is not None
        end = self._value.push(text, position)
        part = text[position:end]
        if self._next is _Next.VALUE and self._key in _ARGUMENTS_KEYS:
            self._arguments.append(part)
        else:
            self._parts.append(part)
        if self._value.complete:
            self._value = None
            self._end_value()
        elif self._value.broken:
            self.ended = True
        return end

    def _end_value(self) -> None:
        value = "".join(self._parts)
        self._parts.clear()
        if self._next is _Next.KEY:
            self._key, self._next = _text_of(value), _Next.COLON
            return
        self._next = _Next.COMMA
        if self._key == "name" and not self.name:
            name = _text_of(value)
            self.name = name if self._known_names is None or name in self._known_names else ""
            self.ended = not self.name


def _text_of(string: str) -> str:
    """The text of a JSON string; empty if it is not valid, or not fit for a name."""
    try:
        text = str(loads(string))
    except ValueError:
        return ""
    return text if text.isprintable() else ""
