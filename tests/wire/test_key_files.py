"""Files of secret keys: only their owner may read them, and none is ever overwritten."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from actorserve.wire.curve.key_files import make_key_pair, read_key_file, write_key_file
from actorserve.wire.trust import Holder, HolderKind, TrustError

ALPHA = Holder(HolderKind.HOST, "alpha")


def test_a_pair_comes_back_from_its_file(tmp_path: Path) -> None:
    """What was written is read again, and only the owner may read the file and enter the folder made for it."""
    file, pair = tmp_path / "keys" / "alpha.key", make_key_pair()
    before = os.umask(0)
    try:
        write_key_file(file, pair, ALPHA)
    finally:
        os.umask(before)
    assert read_key_file(file) == pair
    assert zmq.curve_public(pair.secret_key.encode()).decode() == pair.public_key
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    """A second key in the same place is refused, also where a link leads elsewhere, and nothing changes."""
    file, pair = tmp_path / "alpha.key", make_key_pair()
    write_key_file(file, pair, ALPHA)
    with pytest.raises(TrustError, match="exists already, and a key is never overwritten"):
        write_key_file(file, make_key_pair(), ALPHA)
    assert read_key_file(file) == pair
    link = tmp_path / "link.key"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TrustError, match="exists already"):
        write_key_file(link, pair, ALPHA)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    """A secret that others may have read or changed is none."""
    file = tmp_path / "alpha.key"
    write_key_file(file, make_key_pair(), ALPHA)
    file.chmod(mode)
    with pytest.raises(TrustError, match="others may read or write the key file"):
        read_key_file(file)


def _link(file: Path) -> None:
    file.rename(file.with_name("real.key"))
    file.symlink_to("real.key")


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


def _write(text: str) -> Callable[[Path], None]:
    return lambda file: (file.write_text(text), None)[1]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (_link, "is a symbolic link"),
        (_pipe, "is not a plain file"),
        (Path.unlink, "No such file"),
        (_write(""), "is not a key file"),
        (_write("secret_key = 7"), "is not a key file"),
        (_write(f'secret_key = "{"x" * 39}"'), "is not a key file"),
        (_write(f'secret_key = "{"#" * 40}"'), "is not a key file"),
        (_write('secret_key = "\N{SNOWMAN}"'), "is not a key file"),
    ],
)
def test_what_is_no_key_file_is_one_line(tmp_path: Path, damage: Callable[[Path], None], problem: str) -> None:
    """A link, a pipe, a missing and a damaged file are errors of one line that names the file, and shows no content."""
    file = tmp_path / "alpha.key"
    write_key_file(file, make_key_pair(), ALPHA)
    damage(file)
    with pytest.raises(TrustError, match=problem) as raised:
        read_key_file(file)
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "xxx" not in str(raised.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give the file to another user")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    """Its owner could have changed it."""
    file = tmp_path / "alpha.key"
    write_key_file(file, make_key_pair(), ALPHA)
    os.chown(file, 12345, 12345)
    with pytest.raises(TrustError, match="belongs to another user"):
        read_key_file(file)
