"""The runtime folder: private, one server at a time, and without what dead servers have left."""

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from actorserve.processes.runtime_folder import CLUSTER, SETTINGS, RuntimeFolderError, runtime_folder
from actorserve.settings import ClusterSettings


def test_a_fresh_runtime_folder_is_private_and_removed() -> None:
    """Without a setting the folder is new, only its owner may enter it, and it is removed with its files."""
    with runtime_folder(ClusterSettings()) as folder:
        (folder / "a.sock").touch()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_a_given_runtime_folder_is_made_and_kept() -> None:
    """A missing folder that the settings name is made and is private; its path becomes absolute, and it stays."""
    with tempfile.TemporaryDirectory(prefix="as-") as short:  # pytest's own folders have too long a path for sockets
        given = Path(os.path.relpath(short)) / "run"
        with runtime_folder(ClusterSettings(runtime_dir=given)) as folder:
            assert folder == Path(short) / "run"
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.exists()


def test_a_runtime_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    """Sockets are never in a folder that other users can enter."""
    tmp_path.chmod(0o755)
    settings = ClusterSettings(runtime_dir=tmp_path)
    with pytest.raises(RuntimeFolderError, match="others may enter"), runtime_folder(settings):
        pass


def test_a_runtime_folder_that_another_server_uses_is_refused() -> None:
    """A second server would take over the sockets of the first. When the first ends, the folder is free again."""
    with tempfile.TemporaryDirectory(prefix="as-") as short:
        settings = ClusterSettings(runtime_dir=Path(short))
        first = runtime_folder(settings)
        with first, pytest.raises(RuntimeFolderError, match="another server uses"), runtime_folder(settings):
            pass
        with runtime_folder(settings) as folder:
            assert folder == Path(short)


def test_a_runtime_folder_with_a_long_path_is_refused(tmp_path: Path) -> None:
    """A path that would not fit a socket's address is refused before anything starts."""
    settings = ClusterSettings(runtime_dir=tmp_path / ("x" * 80))
    with pytest.raises(RuntimeFolderError, match="too long for sockets"), runtime_folder(settings):
        pass


def test_what_an_earlier_server_left_is_removed() -> None:
    """Sockets, settings and counts of an earlier server are gone when the next one starts. Other files stay, and so
    does the socket of the process that sets power caps, which outlasts servers.
    """
    with tempfile.TemporaryDirectory(prefix="as-") as short:
        left = [Path(short) / name for name in ("worker-0.sock", SETTINGS, CLUSTER, "notes.txt", "power.sock")]
        for file in left:
            file.touch()
        (Path(short) / "counts").mkdir()
        with runtime_folder(ClusterSettings(runtime_dir=Path(short)), ("counts",)) as folder:
            assert {file.name for file in folder.iterdir()} == {"notes.txt", "power.sock"}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in which fresh runtime folders are made."""
    with tempfile.TemporaryDirectory(prefix="as-") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        yield Path(short)


def _left_by_a_server(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    (folder / SETTINGS).touch()
    (folder / "worker-0.sock").touch()
    return folder


@contextmanager
def _in_use(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def test_folders_of_dead_servers_are_removed_at_the_next_start(temporary: Path) -> None:
    """A fresh folder that a killed server left is removed; one in use, one just made, and others' folders stay."""
    dead, alive = (_left_by_a_server(temporary / f"actorserve-{name}") for name in ("dead0000", "alive000"))
    other = _left_by_a_server(temporary / "actorserve-of-mine")
    (just_made := temporary / "actorserve-fresh000").mkdir(mode=0o700)
    target = _left_by_a_server(temporary / "elsewhere")
    (link := temporary / "actorserve-link0000").symlink_to(target)
    with _in_use(alive), runtime_folder(ClusterSettings()) as folder:
        assert not dead.exists()
        assert set(temporary.iterdir()) == {alive, other, just_made, target, link, folder}
    assert (target / SETTINGS).exists()
