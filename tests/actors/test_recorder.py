"""Journals: their contents and their files."""

import os
import stat
from pathlib import Path

import pytest

from actorserve.actors.recorder import open_journal
from actorserve.core.messages import Peer
from actorserve.errors import SettingsError

W = "worker-0"


def test_only_its_owner_reads_a_journal(tmp_path: Path) -> None:
    """A journal holds prompts and keys, so its file is private from the first byte on."""
    with open_journal(tmp_path / "new", Peer(W, 7)) as journal:
        assert stat.S_IMODE(os.fstat(journal.fileno()).st_mode) == 0o600
    assert (tmp_path / "new" / f"{W}-7.journal").exists()
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_a_journal_is_written_into_no_existing_file(tmp_path: Path) -> None:
    """If a file or link already exists at a journal's path, it is neither written to nor followed."""
    target = tmp_path / "target"
    (tmp_path / f"{W}-7.journal").symlink_to(target)
    (tmp_path / f"{W}-8.journal").write_text("mine", encoding="utf-8")
    for incarnation in (7, 8):
        with pytest.raises(FileExistsError):
            open_journal(tmp_path, Peer(W, incarnation))
    assert not target.exists()
    assert (tmp_path / f"{W}-8.journal").read_text(encoding="utf-8") == "mine"


def test_a_journal_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder's owner could remove the journal or replace it."""
    monkeypatch.setattr("actorserve.actors.recorder.os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(SettingsError, match="belongs to another user"):
        open_journal(tmp_path, Peer(W, 7))
    assert list(tmp_path.iterdir()) == []
