"""Server-sent events as clients of this API read them: every event is ``data:``, one line of JSON, and a blank line."""

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

MEDIA_TYPE = "text/event-stream"
HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # otherwise nginx buffers a stream until it has 4 KiB
}
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment. Clients skip it, but it keeps proxies from closing a silent connection."""


def event(data: Mapping[str, Any]) -> bytes:
    """One event. JSON escapes line breaks, so it is always one line."""
    return b"data: %b\n\n" % to_json(data)


class ChunkEvents:
    """Makes the events of one answer's chunks. The fields that all of them repeat are encoded once."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        """``head`` is what precedes ``choices`` in every chunk; it is not empty."""
        self._begin = b'data: %b,"choices":[' % to_json(head)[:-1]

    def event(self, *choices: Mapping[str, Any]) -> bytes:
        """A chunk without ``usage``."""
        return b"%b%b]}\n\n" % (self._begin, b",".join(map(to_json, choices)))

    def event_with_usage(self, usage: Mapping[str, Any] | None, *choices: Mapping[str, Any]) -> bytes:
        """A chunk with ``usage``, which may be null."""
        return b'%b%b],"usage":%b}\n\n' % (self._begin, b",".join(map(to_json, choices)), to_json(usage))
