"""The calls of Qwen3-Coder, whose arguments are not JSON."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from actorserve.http.chat.text_reader import Reading, num_begun
from actorserve.http.chat.tools.call_form import Functions
from actorserve.http.chat.tools.call_reader import CallReader
from actorserve.http.chat.tools.hermes import BEGIN, END, HERMES

FUNCTION = "<function="
END_FUNCTION = "</function>"
PARAMETER = "<parameter="
END_PARAMETER = "</parameter>"
_ENDS_OF_VALUE = (f"\n{END_PARAMETER}", END_PARAMETER)
_END_VALUE = re.compile("|".join(map(re.escape, _ENDS_OF_VALUE)))
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_NAME = re.compile(r"([^<>\n]+)>")
_MAX_NAME_CHARS = 256


class Qwen3CoderCalls(CallReader):
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>``.

    The outer markers may be missing. Hermes' form is understood as well, because forced calls have it. The arguments
    are written as JSON for the client: a parameter that the schema declares to be a string is one, and any other value
    is taken as the JSON that it is, or else as a string.
    """

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        super().__init__()

    def _read_calls(self) -> Reading[None]:
        is_open = False
        while marker := (yield from self._text_until(BEGIN, FUNCTION, END)):
            if marker == BEGIN:
                is_open = (yield from self._peek()) == "{" and (yield from self._object())
            elif marker == FUNCTION:
                is_open = yield from self._function()
            elif is_open:
                is_open = False
                self._held.clear()

    def _function(self) -> Reading[bool]:
        name = yield from self._name()
        if not name:
            return False
        properties = (self._functions.get(name) or {}).get("properties")
        self._give_call("{", name)
        separator = ""
        while (yield from self._next(PARAMETER, END_FUNCTION)) == PARAMETER and (key := (yield from self._name())):
            schema = properties.get(key) if isinstance(properties, Mapping) else None
            self._give_call(f"{separator}{json.dumps(key, ensure_ascii=False)}: ", "")
            if isinstance(schema, Mapping) and schema.get("type") == "string":
                complete = yield from self._string()
            else:
                complete = yield from self._json()
            if not complete:
                return True
            separator = ", "
        self._give_call("}", "")
        self.has_whole_call = True
        return True

    def _name(self) -> Reading[str]:
        """Read a name and its ``>``. Empty, with nothing read, if there is none."""
        while True:
            found = _NAME.match(self._unread, 0, _MAX_NAME_CHARS)
            if found is not None:
                self._unread = self._unread[found.end() :]
                return found[1]
            if len(self._unread) >= _MAX_NAME_CHARS or not (yield from self._more()):
                return ""

    def _next(self, *markers: str) -> Reading[str]:
        """Skip white space inside of a call, and read the marker behind it. Empty if something else is there."""
        yield from self._peek()
        self._held.clear()
        while True:
            for marker in markers:
                if self._unread.startswith(marker):
                    self._unread = self._unread[len(marker) :]
                    return marker
            is_begun = any(marker.startswith(self._unread) for marker in markers)
            if not (is_begun and (yield from self._more())):
                return ""

    def _string(self) -> Reading[bool]:
        """Give a string's value as it comes. False if the text ends inside of it."""
        self._give_call('"', "")
        complete = yield from self._value(lambda text: self._give_call(json.dumps(text, ensure_ascii=False)[1:-1], ""))
        if complete:
            self._give_call('"', "")
        return complete

    def _json(self) -> Reading[bool]:
        """Give another value when it is complete. False if the text ends inside of it."""
        parts: list[str] = []
        complete = yield from self._value(parts.append)
        if complete:
            self._give_call(_as_json("".join(parts)), "")
        return complete

    def _value(self, take: Callable[[str], None]) -> Reading[bool]:
        """Read a value without its line breaks at both ends. False if the text ends inside of it."""
        while not self._unread and (yield from self._more()):
            pass
        self._unread = self._unread.removeprefix("\n")
        while True:
            found = _END_VALUE.search(self._unread)
            end = found.start() if found else len(self._unread) - num_begun(self._unread, _ENDS_OF_VALUE)
            take(self._unread[:end])
            self._unread = self._unread[end:]
            if found:
                self._unread = self._unread[len(found[0]) :]
                return True
            if not (yield from self._more()):
                take(self._unread)
                self._unread = ""
                return False


def _as_json(value: str) -> str:
    """The value if it is JSON, else a JSON string of it. Python's words for constants are understood as well."""
    value = _CONSTANTS.get(value, value)
    try:
        json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


QWEN3_CODER = replace(
    HERMES,
    markers=(BEGIN, END, FUNCTION, END_FUNCTION, PARAMETER, END_PARAMETER),
    new_reader=Qwen3CoderCalls,
    trigger="",
)
