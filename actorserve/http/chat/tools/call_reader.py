"""What the parsers of all forms of tool calls share: the calls, and the text beside them."""

import secrets
from abc import abstractmethod
from collections.abc import Collection

from actorserve.http.chat.deltas import ToolCallDelta
from actorserve.http.chat.text_reader import Reading, TextReader
from actorserve.http.chat.tools.call_object import CallObject
from actorserve.http.chat.tools.json_value import JsonValue


class CallReader(TextReader):
    """The base of an ``OutputParser`` of one form of tool calls.

    White space before a call and behind the last one is dropped, because templates put it there themselves when the
    answer comes back in a later request. Text that only looks like a call is given as text.
    """

    is_complete = False  # another call or text may follow

    def __init__(self) -> None:
        self.has_whole_call = False
        """Whether a call has ended."""
        self._num_calls = 0
        super().__init__()

    @property
    def has_tool_calls(self) -> bool:
        return self._num_calls > 0

    def _make_id(self) -> str:
        """A fresh id, as OpenAI's API makes them."""
        return f"call_{secrets.token_hex(12)}"

    def _read(self) -> Reading[None]:
        yield from self._read_calls()
        if not (self.has_tool_calls and "".join(self._held).isspace()):
            self._give_held()

    @abstractmethod
    def _read_calls(self) -> Reading[None]:
        """Read until there is no more text; what is held then is given."""

    def _object(self, known_names: Collection[str] | None = None) -> Reading[bool]:
        """Read a call that is a JSON object. False if it is none, and nothing was read."""
        call = CallObject(known_names)
        begun = False
        while True:
            self._unread = call.push(self._unread)
            if call.is_call:
                self._give_call(call.take_arguments(), "" if begun else call.name)
                begun = True
            if call.ended or not (yield from self._more()):
                break
        self.has_whole_call = self.has_whole_call or (begun and call.ended)
        self._unread = call.text + self._unread
        return begun

    def _arguments(self, name: str, call_id: str) -> Reading[None]:
        """Read the arguments of a call whose name came before; they begin with a brace."""
        value = JsonValue()
        while True:
            end = value.push(self._unread)
            self._give_call(self._unread[:end], name, call_id)
            self._unread, name = self._unread[end:], ""
            if value.complete or value.broken:
                self.has_whole_call = True
                return
            if not (yield from self._more()):
                return

    def _give_call(self, arguments: str, name: str, call_id: str = "") -> None:
        """Give a part of a call. Its first part has its name."""
        if name:
            self._held.clear()
            self._num_calls += 1
            self._deltas.append(ToolCallDelta(self._num_calls - 1, arguments, call_id or self._make_id(), name))
        elif arguments:
            self._deltas.append(ToolCallDelta(self._num_calls - 1, arguments))
