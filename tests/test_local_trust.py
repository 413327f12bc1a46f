"""Caches that others could have written are refused, whatever way they could."""

import os
import stat
from pathlib import Path

import pytest

from actorserve.errors import ActorserveError
from actorserve.local_trust import UntrustedError, check_file, open_lock, trusted_folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return trusted_folder(tmp_path / "above" / "cache")


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """The files in this set seem to belong to another user."""
    theirs: set[Path] = set()
    real = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        facts = real(path)
        if path not in theirs:
            return facts
        return os.stat_result((*facts[:4], 12345, *facts[5:10]))

    monkeypatch.setattr(Path, "lstat", lstat)
    return theirs


def test_new_folders_are_private(tmp_path: Path) -> None:
    """A missing folder and the missing ones above it are made for their owner alone, whatever the umask is."""
    before = os.umask(0)
    try:
        folder = trusted_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    for made in (folder, folder.parent):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert trusted_folder(folder) == folder


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_a_folder_that_others_may_write_is_refused(cache: Path, mode: int) -> None:
    """The error names the folder and what to do, in one line. The sticky bit does not help: others may add files."""
    cache.chmod(mode)
    with pytest.raises(UntrustedError, match=r"chmod go-w .*cache, or set ACTORSERVE_CACHE") as caught:
        trusted_folder(cache)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ActorserveError)


def test_a_folder_below_one_that_others_may_write_is_refused(cache: Path) -> None:
    """Others could rename the cache there, unless the folder above has the sticky bit, as /tmp has."""
    cache.parent.chmod(0o777)
    with pytest.raises(UntrustedError, match="above"):
        trusted_folder(cache)
    cache.parent.chmod(0o1777)
    assert trusted_folder(cache) == cache


def test_folders_of_others_are_refused(cache: Path, others: set[Path]) -> None:
    """Neither the cache nor a folder above it may belong to another user; root's are trusted."""
    for theirs in (cache, cache.parent):
        others.clear()
        others.add(theirs)
        with pytest.raises(UntrustedError, match="another user"):
            trusted_folder(cache)


def test_links(cache: Path, tmp_path: Path, others: set[Path]) -> None:
    """The cache itself is no link. A link above it counts if this user made it, and what it leads to is checked."""
    link = tmp_path / "link"
    link.symlink_to(cache)
    with pytest.raises(UntrustedError, match="symbolic link"):
        trusted_folder(link)
    assert trusted_folder(link / "inner") == link / "inner"
    others.add(link)
    with pytest.raises(UntrustedError, match="link of another user"):
        trusted_folder(link / "inner")
    others.clear()
    cache.chmod(0o777)
    with pytest.raises(UntrustedError, match="chmod"):
        trusted_folder(link / "inner")


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    """Links that lead to themselves are an error, and no endless search."""
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="symbolic links"):
        trusted_folder(tmp_path / "a" / "x")


def test_files(cache: Path, others: set[Path]) -> None:
    """A plain file of this user is trusted; one of another user, one that others may write, and a link are not."""
    file = cache / "library.so"
    with pytest.raises(FileNotFoundError):
        check_file(file)
    file.write_bytes(b"x")
    file.chmod(0o644)
    check_file(file)
    file.chmod(0o664)
    with pytest.raises(UntrustedError, match="remove it"):
        check_file(file)
    file.chmod(0o644)
    others.add(file)
    with pytest.raises(UntrustedError, match="remove it"):
        check_file(file)
    link = cache / "link.so"
    link.symlink_to("/bin/true")
    with pytest.raises(UntrustedError, match="plain file"):
        check_file(link)
    with pytest.raises(UntrustedError, match="plain file"):
        check_file(cache)


def test_a_lock_keeps_what_it_holds(cache: Path, tmp_path: Path) -> None:
    """Locking truncates nothing: neither a file of that name, nor what a link of that name leads to."""
    with open_lock(cache / "build.lock") as lock:
        assert stat.S_IMODE(os.fstat(lock.fileno()).st_mode) & 0o077 == 0
    (cache / "build.lock").write_text("kept")
    with open_lock(cache / "build.lock"):
        pass
    assert (cache / "build.lock").read_text() == "kept"
    target = tmp_path / "precious"
    target.write_text("precious")
    (cache / "other.lock").symlink_to(target)
    with pytest.raises(UntrustedError, match="symbolic link"):
        open_lock(cache / "other.lock")
    assert target.read_text() == "precious"
    os.mkfifo(cache / "pipe.lock")
    with pytest.raises(UntrustedError, match="plain file"):
        open_lock(cache / "pipe.lock")
    (cache / "open.lock").touch(0o666)
    (cache / "open.lock").chmod(0o666)
    with pytest.raises(UntrustedError):
        open_lock(cache / "open.lock")


def test_this_user_and_root_are_trusted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For another user of this machine the same cache is somebody else's."""
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    if cache.stat().st_uid == 0:
        assert trusted_folder(cache) == cache
    else:
        with pytest.raises(UntrustedError):
            trusted_folder(cache)
