"""The way of the last requests through one process: what happened to each of them, and when."""

from collections import OrderedDict
from typing import Final, NamedTuple

from actorserve.core.messages import Column
from actorserve.core.operations.tables import number_column, text_column

MAX_REQUESTS: Final = 2048
MAX_NOTES: Final = 128
"""Of one request. Its first half stays, and of the rest the newest."""


class _Note(NamedTuple):
    now: float
    what: str
    text: str


class RequestLog:
    """The notes of the ``MAX_REQUESTS`` requests that came last. They stay after a request has ended."""

    def __init__(self) -> None:
        self._notes: OrderedDict[str, list[_Note]] = OrderedDict()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._notes

    def note(self, request_id: str, now: float, what: str, text: str = "") -> None:
        notes = self._notes.get(request_id)
        if notes is None:
            notes = self._notes[request_id] = []
            if len(self._notes) > MAX_REQUESTS:
                self._notes.popitem(last=False)
        notes.append(_Note(now, what, text))
        if len(notes) > MAX_NOTES:
            del notes[MAX_NOTES // 2]

    def table(self, request_id: str, now: float) -> tuple[Column, ...]:
        """The notes of a request, the oldest first; empty if there are none. The reader knows in which process."""
        notes = self._notes.get(request_id, [])
        return (
            number_column("ago_s", [now - note.now for note in notes]),
            text_column("event", [note.what for note in notes]),
            text_column("text", [note.text for note in notes]),
        )
