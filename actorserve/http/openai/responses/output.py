"""The output of a response: items of text, reasoning and function calls, and the events that tell how they grow.

An item begins with ``response.output_item.added`` and ends with ``response.output_item.done``. Between them, its text
comes in deltas and once more as a whole, as OpenAI's API defines it. Reasoning is given as ``reasoning_text``, because
it is the model's own text and no summary.
"""

from typing import Protocol

from pydantic_core import to_json

from actorserve.http.answers.answer_format import Json
from actorserve.http.chat.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from actorserve.http.openai.responses.events import ResponseEvents, begin_event
from actorserve.http.openai.responses.tools import OfferedTools


class Output:
    """The items of one response, whose ids contain ``name``. Its methods return the events that tell the change."""

    def __init__(self, events: ResponseEvents, name: str, tools: OfferedTools) -> None:
        self._events = events
        self._name = name
        self._tools = tools
        self._items: list[_Item] = []
        self._is_open = False  # whether the last item can grow

    def add(self, delta: Delta, logprobs: list[Json]) -> bytes:
        """More output. ``logprobs`` are of the tokens that begin in this text; only text shows them."""
        events = b""
        if not (self._is_open and self._items[-1].continues(delta)):
            events = self.close("completed") + self._begin(delta)
        return events + self._items[-1].add(self._events, delta, logprobs)

    def close(self, status: str) -> bytes:
        """The last item has ended, with this status. Nothing if it had ended before."""
        if not self._is_open:
            return b""
        self._is_open = False
        item = self._items[-1]
        item.status = status
        return item.ending(self._events) + self._item_event("response.output_item.done")

    def end(self, status: str) -> bytes:
        """No more output comes. An output without a call has a message, even if the model wrote none."""
        events = b""
        if not any(isinstance(item, _Message | _Call) for item in self._items):
            events = self.close("completed") + self._begin(TextDelta(""))
        return events + self.close(status)

    def items(self) -> list[Json]:
        return [item.fields() for item in self._items]

    def _begin(self, delta: Delta) -> bytes:
        index = len(self._items)
        match delta:
            case TextDelta():
                item: _Item = _Message(f"msg_{self._name}_{index}", index)
            case ReasoningDelta():
                item = _Reasoning(f"rs_{self._name}_{index}", index)
            case ToolCallDelta():
                item = _Call(f"fc_{self._name}_{index}", index, delta, self._tools.names(delta.name))
        self._items.append(item)
        self._is_open = True
        return self._item_event("response.output_item.added") + item.beginning(self._events)

    def _item_event(self, kind: str) -> bytes:
        item = self._items[-1]
        return self._events.event(kind, {"output_index": item.index, "item": item.fields()})


class _Item(Protocol):
    """One item of the output. ``index`` is its place in the output."""

    index: int
    status: str

    def continues(self, delta: Delta) -> bool:
        """Whether ``delta`` belongs to this item."""
        ...

    def beginning(self, events: ResponseEvents) -> bytes:
        """What follows the item's first event."""
        ...

    def add(self, events: ResponseEvents, delta: Delta, logprobs: list[Json]) -> bytes: ...

    def ending(self, events: ResponseEvents) -> bytes:
        """What precedes the item's last event."""
        ...

    def fields(self) -> Json:
        """The item so far, as a JSON object."""
        ...


class _Message:
    """The answer's text, as the single part of a message."""

    def __init__(self, item_id: str, index: int) -> None:
        self.index = index
        self.status = "in_progress"
        self._place: Json = {"item_id": item_id, "output_index": index, "content_index": 0}
        self._begin_delta = begin_event("response.output_text.delta", self._place)
        self._texts: list[str] = []
        self._logprobs: list[Json] = []
        self._has_part = False

    def continues(self, delta: Delta) -> bool:
        return isinstance(delta, TextDelta)

    def beginning(self, events: ResponseEvents) -> bytes:
        self._has_part = True
        return events.event("response.content_part.added", {**self._place, "part": self._part()})

    def add(self, events: ResponseEvents, delta: Delta, logprobs: list[Json]) -> bytes:
        assert isinstance(delta, TextDelta)
        self._texts.append(delta.text)
        self._logprobs += logprobs
        rest = b',"delta":%b,"logprobs":%b' % (to_json(delta.text), to_json(logprobs))
        return events.frequent(self._begin_delta, rest)

    def ending(self, events: ResponseEvents) -> bytes:
        whole = {"text": "".join(self._texts), "logprobs": self._logprobs}
        return events.event("response.output_text.done", {**self._place, **whole}) + events.event(
            "response.content_part.done", {**self._place, "part": self._part()}
        )

    def fields(self) -> Json:
        content = [self._part()] if self._has_part else []
        return {
            "id": self._place["item_id"],
            "type": "message",
            "role": "assistant",
            "status": self.status,
            "content": content,
        }

    def _part(self) -> Json:
        return {"type": "output_text", "text": "".join(self._texts), "annotations": [], "logprobs": self._logprobs}


class _Reasoning:
    """The thoughts before the answer."""

    def __init__(self, item_id: str, index: int) -> None:
        self.index = index
        self.status = "in_progress"
        self._place: Json = {"item_id": item_id, "output_index": index, "content_index": 0}
        self._begin_delta = begin_event("response.reasoning_text.delta", self._place)
        self._texts: list[str] = []
        self._has_part = False

    def continues(self, delta: Delta) -> bool:
        return isinstance(delta, ReasoningDelta)

    def beginning(self, events: ResponseEvents) -> bytes:
        self._has_part = True
        return events.event("response.content_part.added", {**self._place, "part": self._part()})

    def add(self, events: ResponseEvents, delta: Delta, logprobs: list[Json]) -> bytes:
        assert isinstance(delta, ReasoningDelta)
        self._texts.append(delta.text)
        return events.frequent(self._begin_delta, b',"delta":%b' % to_json(delta.text))

    def ending(self, events: ResponseEvents) -> bytes:
        whole = {"text": "".join(self._texts)}
        return events.event("response.reasoning_text.done", {**self._place, **whole}) + events.event(
            "response.content_part.done", {**self._place, "part": self._part()}
        )

    def fields(self) -> Json:
        content = [self._part()] if self._has_part else []
        return {
            "id": self._place["item_id"],
            "type": "reasoning",
            "summary": [],
            "content": content,
            "status": self.status,
        }

    def _part(self) -> Json:
        return {"type": "reasoning_text", "text": "".join(self._texts)}


class _Call:
    """A function call. Its arguments are JSON text."""

    def __init__(self, item_id: str, index: int, first: ToolCallDelta, names: Json) -> None:
        self.index = index
        self.status = "in_progress"
        self._call_index = first.index
        self._call_id = first.id
        self._names = names
        self._place: Json = {"item_id": item_id, "output_index": index}
        self._begin_delta = begin_event("response.function_call_arguments.delta", self._place)
        self._arguments: list[str] = []

    def continues(self, delta: Delta) -> bool:
        return isinstance(delta, ToolCallDelta) and delta.index == self._call_index

    def beginning(self, events: ResponseEvents) -> bytes:
        return b""

    def add(self, events: ResponseEvents, delta: Delta, logprobs: list[Json]) -> bytes:
        assert isinstance(delta, ToolCallDelta)
        if not delta.arguments:
            return b""
        self._arguments.append(delta.arguments)
        return events.frequent(self._begin_delta, b',"delta":%b' % to_json(delta.arguments))

    def ending(self, events: ResponseEvents) -> bytes:
        whole = {**self._names, "arguments": "".join(self._arguments)}
        return events.event("response.function_call_arguments.done", {**self._place, **whole})

    def fields(self) -> Json:
        return {
            "id": self._place["item_id"],
            "type": "function_call",
            "call_id": self._call_id,
            **self._names,
            "arguments": "".join(self._arguments),
            "status": self.status,
        }
