"""The content of an answer: blocks of thoughts, text and calls, and the events that tell how they grow."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json, to_json

from actorserve.http.answers.answer_format import Json
from actorserve.http.chat.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta


def event(kind: str, fields: Mapping[str, Any]) -> bytes:
    """A server-sent event of this type, which its data repeats."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), to_json({"type": kind, **fields}))


class Content:
    """The blocks of one answer. Its methods return the events that tell the change."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._is_open = False  # whether the last block can grow

    def add(self, deltas: Sequence[Delta]) -> bytes:
        events: list[bytes] = []
        for delta in deltas:
            if not (self._is_open and self._blocks[-1].continues(delta)):
                events += [self.close(), self._begin(delta)]
            events.append(self._blocks[-1].add(delta))
        return b"".join(events)

    def close(self) -> bytes:
        """The last block has ended. Nothing if it had ended before."""
        if not self._is_open:
            return b""
        self._is_open = False
        block = self._blocks[-1]
        return block.ending() + event("content_block_stop", {"index": block.index})

    def fields(self) -> list[Json]:
        return [block.fields() for block in self._blocks]

    def _begin(self, delta: Delta) -> bytes:
        block = _Block(len(self._blocks), delta)
        self._blocks.append(block)
        self._is_open = True
        return event("content_block_start", {"index": block.index, "content_block": block.fields()})


class _Block:
    """One block. ``index`` is its place in the content."""

    def __init__(self, index: int, first: Delta) -> None:
        self.index = index
        self._first = first
        self._texts: list[str] = []
        self._before, self._after = _around_text(index, first)

    def continues(self, delta: Delta) -> bool:
        """Whether ``delta`` belongs to this block."""
        if isinstance(delta, ToolCallDelta):
            return isinstance(self._first, ToolCallDelta) and delta.index == self._first.index
        return type(delta) is type(self._first)

    def add(self, delta: Delta) -> bytes:
        text = delta.arguments if isinstance(delta, ToolCallDelta) else delta.text
        if not text:
            return b""
        self._texts.append(text)
        return b"%b%b%b" % (self._before, to_json(text), self._after)

    def ending(self) -> bytes:
        """What precedes the block's last event. Clients that send thoughts back want a signature with them; it is
        empty, because this server believes its clients."""
        if not isinstance(self._first, ReasoningDelta):
            return b""
        delta = {"type": "signature_delta", "signature": ""}
        return event("content_block_delta", {"index": self.index, "delta": delta})

    def fields(self) -> Json:
        """The block so far, as a JSON object."""
        text = "".join(self._texts)
        match self._first:
            case TextDelta():
                return {"type": "text", "text": text}
            case ReasoningDelta():
                return {"type": "thinking", "thinking": text, "signature": ""}
            case ToolCallDelta(id=call_id, name=name):
                return {"type": "tool_use", "id": call_id, "name": name, "input": _read_arguments(text)}


def _around_text(index: int, first: Delta) -> tuple[bytes, bytes]:
    """What stands before and after the text in the events of a block's growth: it is encoded once."""
    match first:
        case TextDelta():
            kind, field = "text_delta", "text"
        case ReasoningDelta():
            kind, field = "thinking_delta", "thinking"
        case ToolCallDelta():
            kind, field = "input_json_delta", "partial_json"
    before, _, after = event("content_block_delta", {"index": index, "delta": {"type": kind, field: ""}}).rpartition(
        b'""'
    )
    return before, after


def _read_arguments(text: str) -> Json:
    """A call's arguments as an object. If the text was cut off, the object has what is there."""
    try:
        arguments = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}
