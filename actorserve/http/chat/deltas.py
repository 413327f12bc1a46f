"""The parts of a chat's output. Parsers make them of the model's text, and all APIs' answer formats write them."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer itself. ``text`` is not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the thoughts that precede the answer. ``text`` is not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a tool call.

    ``index`` counts a choice's calls from zero. A call's first delta has its ``id`` and ``name``, and later deltas
    leave them empty. The call's arguments are the concatenated ``arguments`` of its deltas, as the model wrote them.
    """

    index: int
    arguments: str
    id: str = ""
    name: str = ""


Delta = TextDelta | ReasoningDelta | ToolCallDelta


class OutputParser(Protocol):
    """Splits the text of one choice into deltas. They do not depend on how the text is split into pieces, except that
    neighbouring deltas of one kind may be joined."""

    @property
    def has_tool_calls(self) -> bool:
        """Whether a tool call has begun."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether no further text can change the answer."""
        ...

    def push(self, text: str) -> list[Delta]:
        """The deltas that have become certain with more text; often none."""
        ...

    def finish(self) -> list[Delta]:
        """No more text comes, so return the deltas of the text that was held back."""
        ...


class PlainText:
    """The ``OutputParser`` of a model that neither thinks nor calls tools: all text is the answer."""

    has_tool_calls = False
    is_complete = False

    def push(self, text: str) -> list[Delta]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Delta]:
        return []
