"""The log's lines: for people, for programs and for systemd's journal, whatever text is logged."""

import io
import json
import logging
import os
import socket
import sys

import pytest

from actorserve import logs
from actorserve.logs import JsonLines, TextLines, escaped, fields

# A forged line, a terminal's command, a C1 control, a Unicode line break, a right-to-left override, a lone surrogate.
HOSTILE = "a\n2026-01-01 00:00:00.000 gateway-0 ERROR forged\r\x1b[2J\x9b31m\u2028\u202e\x7f\x00\ud800 key=x"


def record(message: str, severity: int = logging.INFO, **values: object) -> logging.LogRecord:
    made = logging.LogRecord("actorserve.test", severity, "test.py", 1, message, None, None)
    vars(made).update(fields(**values))
    return made


def raised() -> logging.LogRecord:
    """An event with a traceback whose text is hostile."""
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        return logging.LogRecord("actorserve.test", logging.ERROR, "test.py", 1, "bug", None, sys.exc_info())


def test_a_line_for_people() -> None:
    """A text line has time, process, level, message, and the values that are not None."""
    line = TextLines("gateway-0").format(
        record("POST /v1/completions 200", key="team a", queued_s=0.00012, workers=("w-0", "w-1"), error=None, empty="")
    )
    assert line[:4].isdecimal()
    assert line.endswith(
        ' gateway-0 INFO POST /v1/completions 200 key="team a" queued_s=0.0001 workers=w-0,w-1 empty=""'
    )


@pytest.mark.parametrize("value", [HOSTILE, *map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0)), "\u2029", "\ufeff"])
def test_no_text_forges_a_line(value: str) -> None:
    """Hostile text in a message, a value, or a process's name stays on its line, and every character of it prints."""
    for formatter in (TextLines(value), JsonLines(value), JsonLines(value, is_journal=True)):
        line = formatter.format(record(f"said {value}", client=value, items=(value,)))
        assert line.isprintable()
    event = json.loads(JsonLines("p").format(record(value, client=value)))
    assert (event["message"], event["client"]) == (value, value)


def test_values_cannot_pass_for_others() -> None:
    """A value with a blank or an equals sign is quoted in a line of text, and quotes in it are escaped."""
    line = TextLines("p").format(record("m", error='x" status=200 y="'))
    assert line.endswith(r'error="x\" status=200 y=\""')
    assert json.loads(JsonLines("p").format(record("m", level="forged", process="forged")))["level"] == "info"


def test_tracebacks() -> None:
    """A traceback keeps its lines as text, with hostile characters escaped, and is one value in JSON."""
    text = TextLines("p").format(raised())
    assert "Traceback" in text
    assert all(line.isprintable() for line in text.split("\n"))
    line = JsonLines("p").format(raised())
    assert line.isprintable()
    assert "ValueError" in json.loads(line)["exception"]


@pytest.mark.parametrize(
    ("level", "priority"),
    [(logging.DEBUG, 7), (logging.INFO, 6), (logging.WARNING, 4), (logging.ERROR, 3), (logging.CRITICAL, 2)],
)
def test_the_journal_gets_priorities(level: int, priority: int) -> None:
    """A line for systemd's journal begins with the event's priority."""
    line = JsonLines("p", is_journal=True).format(record("m", level))
    assert line.startswith(f"<{priority}>{{")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "log_format", "is_json"),
    [
        (_Terminal, "auto", False),
        (io.StringIO, "auto", True),
        (_Terminal, "json", True),
        (io.StringIO, "text", False),
    ],
)
def test_the_format_follows_the_stream(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], log_format: logs.LogFormat, is_json: bool
) -> None:
    """``auto`` writes text on a terminal and JSON elsewhere; the other formats hold everywhere."""
    opened = stream()
    monkeypatch.setattr(sys, "stderr", opened)
    logs.configure("p", "info", log_format)
    logging.getLogger("actorserve.test").info("hello", extra=fields(n=1))
    line = opened.getvalue()
    assert line.count("\n") == 1
    if is_json:
        event = json.loads(line)
        assert {name: event[name] for name in ("level", "process", "logger", "message", "n")} == {
            "level": "info",
            "process": "p",
            "logger": "actorserve.test",
            "message": "hello",
            "n": 1,
        }
        assert event["time"].endswith("+00:00")
    else:
        assert line.endswith("p INFO hello n=1\n")


def test_the_journal_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket that JOURNAL_STREAM names is the journal's, and another one is not."""
    ours, theirs = socket.socketpair()
    with ours, theirs, os.fdopen(os.dup(ours.fileno()), "w") as stream:
        facts = os.fstat(ours.fileno())
        for named, is_journal in ((f"{facts.st_dev}:{facts.st_ino}", True), ("1:1", False), ("", False), ("x", False)):
            monkeypatch.setenv("JOURNAL_STREAM", named)
            monkeypatch.setattr(sys, "stderr", stream)
            logs.configure("p")
            logging.getLogger("actorserve.test").warning("m")
            assert theirs.recv(4096).startswith(b"<4>{" if is_journal else b"{")


def test_levels_change_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events below the level are dropped, also after it was changed; libraries' chatter is always dropped."""
    opened = _Terminal()
    monkeypatch.setattr(sys, "stderr", opened)
    logs.configure("p", "warning")
    log = logging.getLogger("actorserve.test")
    log.info("one")
    logs.set_level("debug")
    log.debug("two")
    logging.getLogger("asyncio").info("three")
    assert [line.split()[-1] for line in opened.getvalue().splitlines()] == ["two"]


def test_printable_text_stays() -> None:
    """Text in any language is not changed."""
    assert escaped("Grüße, 世界 🙂") == "Grüße, 世界 🙂"
