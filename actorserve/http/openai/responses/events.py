"""The events of a response's stream: each has a type, which is also the name of the server-sent event, and a number."""

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json


class ResponseEvents:
    """Encodes the events of one stream and numbers them from zero."""

    def __init__(self) -> None:
        self._number = 0

    def event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        """One event of this type. ``fields`` are its further fields, at least one."""
        return self.frequent(begin_event(kind, fields), b"")

    def frequent(self, begin: bytes, rest: bytes) -> bytes:
        """An event that begins as ``begin_event`` has encoded it. ``rest`` is JSON text of further fields:
        ``,"name":value``."""
        number, self._number = self._number, self._number + 1
        return b'%b%b,"sequence_number":%d}\n\n' % (begin, rest, number)


def begin_event(kind: str, fields: Mapping[str, Any]) -> bytes:
    """The beginning of events of this type that share ``fields``: everything that need not be encoded again."""
    return b"event: %b\ndata: %b" % (kind.encode(), to_json({"type": kind, **fields})[:-1])
