"""Digests of weight files are kept, and belong to the bytes that are in the file now."""

import hashlib
import os
from pathlib import Path

import pytest

from workers.weights.file_digest import file_digest


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of weights, and a cache of its own."""
    monkeypatch.setenv("ACTORSERVE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "weights"
    path.write_bytes(b"first")
    return path


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def kept(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache" / "digests").iterdir())


def test_a_file_is_hashed_once(file: Path, tmp_path: Path) -> None:
    """A second start takes the digest that was kept, and does not read the file."""
    assert file_digest(file) == hash_of(b"first")
    (path,) = kept(tmp_path)
    path.write_text(hash_of(b"what was kept"))
    assert file_digest(file) == hash_of(b"what was kept")


def test_another_content_has_another_digest(file: Path) -> None:
    """New bytes of the same length and with the old time of modification are hashed again."""
    times = file.stat()
    file_digest(file)
    file.write_bytes(b"other")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file_digest(file) == hash_of(b"other")


def test_a_replaced_file_is_hashed_again(file: Path, tmp_path: Path) -> None:
    """Another file in the place of the first one has its own digest."""
    file_digest(file)
    (tmp_path / "new").write_bytes(b"third")
    os.replace(tmp_path / "new", file)
    assert file_digest(file) == hash_of(b"third")


@pytest.mark.parametrize("damage", [b"", b"0123", b"\xff" * 64, b"z" * 64])
def test_a_damaged_digest_is_made_again(file: Path, tmp_path: Path, damage: bytes) -> None:
    """What is no digest is not used, and is replaced."""
    file_digest(file)
    (path,) = kept(tmp_path)
    path.write_bytes(damage)
    assert file_digest(file) == hash_of(b"first")
    assert path.read_text() == hash_of(b"first")


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(file: Path, tmp_path: Path) -> None:
    """Without a usable cache folder the file is hashed at each start."""
    (tmp_path / "cache").write_text("")
    assert file_digest(file) == hash_of(b"first")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    """A file that is not there raises OSError."""
    with pytest.raises(FileNotFoundError):
        file_digest(tmp_path / "none")
