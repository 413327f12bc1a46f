"""At most one tool call, for requests with ``parallel_tool_calls: false``."""

from collections.abc import Iterable

from actorserve.http.chat.deltas import Delta, ToolCallDelta
from actorserve.http.chat.tools.call_reader import CallReader


class FirstCall:
    """An ``OutputParser`` that drops everything behind another parser's first call."""

    def __init__(self, parser: CallReader) -> None:
        self._parser = parser
        self._has_call = False

    @property
    def has_tool_calls(self) -> bool:
        return self._has_call

    @property
    def is_complete(self) -> bool:
        return self._parser.has_whole_call

    def push(self, text: str) -> list[Delta]:
        return self._until_second_call(self._parser.push(text))

    def finish(self) -> list[Delta]:
        return self._until_second_call(self._parser.finish())

    def _until_second_call(self, deltas: Iterable[Delta]) -> list[Delta]:
        kept: list[Delta] = []
        for delta in deltas:
            is_first_call = isinstance(delta, ToolCallDelta) and delta.index == 0
            if is_first_call or not self._has_call:
                kept.append(delta)
            self._has_call = self._has_call or is_first_call
        return kept
