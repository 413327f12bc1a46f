"""A chat's output as a whole: what its deltas add up to."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from actorserve.http.chat.deltas import Delta, ReasoningDelta, TextDelta


@dataclass(slots=True)
class Call:
    """A tool call. ``arguments`` is JSON text, as far as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Message:
    """The answer, the thoughts before it, and the tool calls. Empty text means that there is none."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, TextDelta):
                self.text += delta.text
            elif isinstance(delta, ReasoningDelta):
                self.reasoning += delta.text
            elif delta.name:
                self.calls.append(Call(delta.id, delta.name, delta.arguments))
            else:
                self.calls[delta.index].arguments += delta.arguments
