"""The way of the last requests through one process: what happened to each of them, and when.

The notes of a request are packed into one ``bytes``. The log takes hours to fill on a server with few requests, and
what it takes meanwhile looks like a leak, so it must be little: about 320 bytes a request, a third of what objects
took.
"""

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from actorserve.core.messages import Column
from actorserve.core.operations.tables import number_column, text_column

MAX_REQUESTS: Final = 2048
MAX_NOTES: Final = 128
"""Of one request. Its first half stays, and of the rest the newest."""
MAX_SHOWN: Final = 16
"""Requests whose ids begin alike."""

_MAX_BYTES: Final = 2**16 - 1  # of a text
_HEAD: Final = struct.Struct("<dHH")  # the time, and how many bytes of event and text follow


class _Note(NamedTuple):
    now: float
    what: str
    text: str


class RequestLog:
    """The notes of the ``MAX_REQUESTS`` requests that came last. They stay after a request has ended."""

    def __init__(self) -> None:
        self._notes: dict[str, bytes] = {}  # the oldest request first

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._notes

    def note(self, request_id: str, now: float, what: str, text: str = "") -> None:
        notes = self._notes.get(request_id)
        if notes is None:
            notes = b""
            if len(self._notes) >= MAX_REQUESTS:
                del self._notes[next(iter(self._notes))]
        notes += _packed(now, what, text)
        if len(notes) > MAX_NOTES * _HEAD.size:  # fewer bytes cannot hold too many notes
            notes = _bounded(notes)
        self._notes[request_id] = notes

    def called(self, name: str) -> list[str]:
        """The ids of the requests that a person may mean by ``name``: the request of this id, or else the newest ones
        whose ids begin with it, because a client and the log of requests know only the beginning.
        """
        if name in self._notes:
            return [name]
        beginning = f"{name}."
        return [request_id for request_id in self._notes if request_id.startswith(beginning)][-MAX_SHOWN:]

    def table(self, request_ids: Sequence[str], now: float) -> tuple[Column, ...]:
        """The notes of these requests, of each the oldest first. The reader knows in which process."""
        notes = [(name, note) for name in request_ids for note in _unpacked(self._notes.get(name, b""))]
        return (
            number_column("ago_s", [now - note.now for _, note in notes]),
            text_column("event", [note.what for _, note in notes]),
            text_column("text", [note.text for _, note in notes]),
            text_column("request", [name for name, _ in notes]),
        )


def _packed(now: float, what: str, text: str) -> bytes:
    event, rest = what.encode(errors="replace")[:_MAX_BYTES], text.encode(errors="replace")[:_MAX_BYTES]
    return _HEAD.pack(now, len(event), len(rest)) + event + rest


def _unpacked(notes: bytes) -> list[_Note]:
    found: list[_Note] = []
    at = 0
    while at < len(notes):
        now, event_bytes, text_bytes = _HEAD.unpack_from(notes, at)
        event_at = at + _HEAD.size
        text_at = event_at + event_bytes
        at = text_at + text_bytes
        found.append(
            _Note(now, notes[event_at:text_at].decode(errors="replace"), notes[text_at:at].decode(errors="replace"))
        )
    return found


def _bounded(notes: bytes) -> bytes:
    """At most ``MAX_NOTES`` of them."""
    found = _unpacked(notes)
    if len(found) <= MAX_NOTES:
        return notes
    del found[MAX_NOTES // 2]
    return b"".join([_packed(note.now, note.what, note.text) for note in found])
