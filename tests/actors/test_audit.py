"""The audit file on a disk that is full: it starts, goes on, and spoils no line but the one that was cut off."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from actorserve.actors.audit import AUDIT_FILE, AuditFile
from actorserve.core.effects import Audit
from actorserve.core.messages import Command, Outcome


def act(number: int) -> Audit:
    return Audit("anna", Command(f"id-{number}", "cordon", (f"worker-{number}",)), Outcome.DONE, "done")


def ids(folder: Path) -> list[str]:
    """What a coordinator reads that starts now."""
    audit = AuditFile(folder)
    found = list(audit.acts_done().command_ids)
    audit.close()
    return found


@contextmanager
def full_disk(file: Path, room: int) -> Iterator[None]:
    """No file can grow beyond the size that ``file`` has now, and so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_line_that_is_cut_off_spoils_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """When the disk has room for a part of a line, the next act's line is whole, and every lost line is logged."""
    audit = AuditFile(tmp_path)
    audit.write(act(1))
    with full_disk(tmp_path / AUDIT_FILE, 20):
        audit.write(act(2))
        audit.write(act(3))
    audit.write(act(4))
    audit.close()
    assert ids(tmp_path) == ["id-1", "id-4"]
    assert ["id-2" in caplog.messages[0], "id-3" in caplog.messages[1], len(caplog.messages)] == [True, True, 2]


def test_a_coordinator_starts_on_a_full_disk(tmp_path: Path) -> None:
    """A last line that is cut off needs a line break, which a full disk has no room for; that is no reason to end."""
    audit = AuditFile(tmp_path)
    audit.write(act(1))
    audit.close()
    with (tmp_path / AUDIT_FILE).open("ab") as file:
        file.write(b'{"time": ')
    with full_disk(tmp_path / AUDIT_FILE, 0):
        audit = AuditFile(tmp_path)
        audit.write(act(2))
    audit.write(act(3))
    audit.close()
    assert ids(tmp_path) == ["id-1", "id-3"]
