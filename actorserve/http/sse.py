"""Server-sent events as clients of this API read them: every event is ``data:``, one line of JSON, and a blank line."""

import json
from collections.abc import Mapping
from typing import Any

MEDIA_TYPE = "text/event-stream"
HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # or nginx keeps a stream back until it has 4 KiB
}
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it, and proxies see that somebody is there."""


def event(data: Mapping[str, Any]) -> bytes:
    """One event. JSON escapes line breaks, so it is always one line."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"
