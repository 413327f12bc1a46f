"""The audit file: one JSON line for each act of an operator, appended and never changed."""

import json
import logging
import os
import time
from collections import deque
from pathlib import Path
from typing import Any, Final

from actorserve.core.effects import Audit
from actorserve.core.messages import ActsDone, Column, Outcome
from actorserve.core.operations.tables import text_column
from actorserve.errors import SettingsError

AUDIT_FILE: Final = "audit.jsonl"
_MAX_LINES: Final = 1024
_FIELDS: Final = ("time", "caller", "verb", "arguments", "outcome", "text")
_log: Final = logging.getLogger("actorserve.audit")


class AuditFile:
    """Appends acts to the file, and knows its last ``_MAX_LINES`` lines.

    Raises: SettingsError if the file cannot be opened, is a link, or belongs to another user.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / AUDIT_FILE
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, flags, 0o600)
            owner = os.fstat(self._descriptor).st_uid
        except OSError as error:
            raise SettingsError(f"cannot open the audit file {self.path}: {error.strerror}") from None
        if owner != os.geteuid():
            os.close(self._descriptor)
            raise SettingsError(f"the audit file {self.path} belongs to another user")
        size = os.fstat(self._descriptor).st_size
        # a crash, or a full disk, has cut off the last line
        self._is_line_open = bool(size) and os.pread(self._descriptor, 1, size - 1) != b"\n"
        self._lines: deque[dict[str, str]] = deque(_read(self.path), maxlen=_MAX_LINES)

    def write(self, act: Audit) -> None:
        """Append one line. A full disk is logged, because the act is done already."""
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "caller": act.caller,
            "verb": act.command.verb,
            "arguments": " ".join(act.command.arguments),
            "outcome": act.outcome.value,
            "text": act.text,
            "id": act.command.command_id,
        }
        self._lines.append(line)
        data = (b"\n" if self._is_line_open else b"") + json.dumps(line).encode() + b"\n"
        try:
            num_written = os.write(self._descriptor, data)
        except OSError as error:
            _log.error("cannot write to %s (%s): %s", self.path, error.strerror, line)
            return
        self._is_line_open = num_written < len(data)
        if self._is_line_open:
            _log.error("could write only a part to %s (the disk is full): %s", self.path, line)

    def table(self, num_lines: int) -> tuple[Column, ...]:
        """The last acts, the oldest first."""
        lines = list(self._lines)[-num_lines:] if num_lines else []
        return tuple(text_column(name, [line[name] for line in lines]) for name in _FIELDS)

    def acts_done(self) -> ActsDone:
        """The answers to the last acts, for a core that does not know them."""
        known = [line for line in self._lines if line["outcome"] in Outcome.__members__.values()]
        return ActsDone(
            tuple(line["id"] for line in known),
            tuple(Outcome(line["outcome"]) for line in known),
            tuple(line["text"] for line in known),
        )

    def close(self) -> None:
        os.close(self._descriptor)


def _read(path: Path) -> list[dict[str, str]]:
    """The last lines that are whole. A crash may have cut off the last one."""
    with path.open("rb") as file:
        lines = deque(file, maxlen=_MAX_LINES)
    parsed: list[dict[str, str]] = []
    for line in lines:
        try:
            values: Any = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict) and all(isinstance(values.get(name), str) for name in (*_FIELDS, "id")):
            parsed.append(values)
    return parsed
