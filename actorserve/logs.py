"""The log of every process: one line per event on stderr, readable on a terminal, and one JSON object elsewhere.

An event is a message and, if it has any, named values (``fields``). Whatever clients and peers send is escaped, so that
no text can begin a line of its own, move a terminal's cursor, or look like another value.
"""

import json
import logging
import os
import stat
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import IO, Any, Final, Literal

LogFormat = Literal["auto", "text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

_FIELDS: Final = "actorserve_fields"
_SYSLOG_PRIORITIES: Final = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3}
_CRITICAL_PRIORITY: Final = 2
_MAX_LINE: Final = 4000
_NOISY: Final = ("asyncio", "httpcore", "httpx", "httpx2", "huggingface_hub", "filelock", "urllib3")
"""Libraries whose lines below a warning would drown ours."""


def fields(**values: Any) -> dict[str, Any]:
    """Named values of an event, for ``extra`` of a logger's methods. Those that are None are left out."""
    return {_FIELDS: {name: value for name, value in values.items() if value is not None}}


def configure(process_name: str, level: LogLevel = "info", log_format: LogFormat = "auto") -> None:
    """Send this process's log to stderr, and drop earlier handlers. ``auto``: text on a terminal, otherwise JSON."""
    stream = sys.stderr
    is_text = log_format == "text" or (log_format == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        TextLines(process_name) if is_text else JsonLines(process_name, is_journal=_is_journal(stream))
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    set_level(level)


def set_level(level: LogLevel) -> None:
    """Drop events below this level from now on."""
    logging.getLogger().setLevel(level.upper())


class TextLines(logging.Formatter):
    """One event as a line for people: time, process, level, message, and values. A traceback keeps its lines."""

    def __init__(self, process_name: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03d {escaped(process_name).replace('%', '%%')} %(levelname)s %(message)s",
            datefmt="%Y-%m-%d %H:%M:%S",
        )

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the standard library's name
        values = "".join(f" {name}={_shown(value)}" for name, value in _fields_of(record).items())
        record.message = escaped(record.message) + values
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the standard library's name
        return "\n".join(map(escaped, super().formatException(ei).split("\n")))


class JsonLines(logging.Formatter):
    """One event as a JSON object on one line. ``is_journal``: systemd's priority precedes it, which the journal reads
    and takes off.
    """

    def __init__(self, process_name: str, *, is_journal: bool = False) -> None:
        super().__init__()
        self._process_name = process_name
        self._is_journal = is_journal

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process_name,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in _fields_of(record).items():
            event.setdefault(name, value)
        if record.exc_info:
            event["exception"] = "".join(traceback.format_exception(*record.exc_info))
        line = _json(event)
        if self._is_journal:
            return f"<{_SYSLOG_PRIORITIES.get(record.levelno, _CRITICAL_PRIORITY)}>{line}"
        return line


def one_line(text: str) -> str:
    """``text`` as one printable line of at most ``_MAX_LINE`` characters, for a message to a person."""
    line = escaped(" ".join(text.split()))
    return line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]}..."


def escaped(text: str) -> str:
    """``text`` with every character escaped that does not print, such as line breaks and a terminal's commands."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def _fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    found: Mapping[str, Any] = getattr(record, _FIELDS, {})
    return found


def _shown(value: Any) -> str:
    """A value in a line of text; quoted unless it is one plain word."""
    if isinstance(value, float):
        return f"{value:.4f}".rstrip("0").rstrip(".")
    if isinstance(value, list | tuple):
        return ",".join(map(_shown, value))
    text = str(value)
    is_word = bool(text) and text.isprintable() and not any(character in text for character in " \"'=,\\")
    return text if is_word else _json(text)


def _json(value: Any) -> str:
    """The value as JSON in printable ASCII."""
    return json.dumps(value, default=str).replace("\x7f", "\\u007f")


def _is_journal(stream: IO[str]) -> bool:
    """Whether the stream leads to systemd's journal, which names its device and inode in ``JOURNAL_STREAM``."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        facts = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return stat.S_ISSOCK(facts.st_mode) and (device, inode) == (str(facts.st_dev), str(facts.st_ino))
