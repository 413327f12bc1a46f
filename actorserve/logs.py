"""The log format of every process: one line per event on stderr, with time, process name and level."""

import logging
import sys


class _OneLine(logging.Formatter):
    """Keeps an event on one line, even if a peer's text holds line breaks. A traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the standard library's name
        record.message = record.message.replace("\r", "\\r").replace("\n", "\\n")
        return super().formatMessage(record)


def configure(process_name: str, level: int = logging.INFO) -> None:
    """Send this process's log to stderr, and drop earlier handlers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _OneLine(
            f"%(asctime)s.%(msecs)03d {process_name.replace('%', '%%')} %(levelname)s %(message)s",
            datefmt="%Y-%m-%d %H:%M:%S",
        )
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
