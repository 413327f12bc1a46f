"""The steps of an installation: each knows what it will do, and whether that is done already. Standard library only."""

import grp
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


class InstallError(Exception):
    """Ends the installation. The text is one line."""


@dataclass(frozen=True)
class Step:
    """``act`` does what ``text`` says. It is left out if ``is_done()``."""

    text: str
    act: Callable[[], None]
    is_done: Callable[[], bool]


@dataclass(frozen=True)
class Owner:
    """A user and a group by name, as the system below ``root`` knows them."""

    user: str
    group: str
    root: Path

    def ids(self) -> tuple[int, int]:
        """Raises: InstallError, if there is no such user or group."""
        users, groups = self.root / "etc/passwd", self.root / "etc/group"
        return _id_of(self.user, users), _id_of(self.group, groups)


def folder(path: Path, mode: int, owner: Owner) -> Step:
    """Make a folder, and give it to its owner."""

    def act() -> None:
        path.mkdir(parents=True, exist_ok=True)
        _give(path, mode, owner)

    return Step(f"make {path} ({mode:o}, {owner.user}:{owner.group})", act, lambda: _is_given(path, mode, owner))


def file(path: Path, text: str, mode: int, owner: Owner, *, keeps: bool = False) -> Step:
    """Write a file, all of it or nothing. With ``keeps``, a file that is there stays as it is."""

    def act() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        number, unfinished = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(number, "w", encoding="utf-8") as out:
                out.write(text)
            _give(Path(unfinished), mode, owner)
            os.replace(unfinished, path)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        finally:
            with suppress(FileNotFoundError):
                os.unlink(unfinished)

    def is_done() -> bool:
        if keeps:
            return path.exists()
        return _is_given(path, mode, owner) and path.read_text(encoding="utf-8") == text

    return Step(f"write {path} ({mode:o}, {owner.user}:{owner.group})", act, is_done)


def gone(path: Path) -> Step:
    """Remove a file, or a folder with all that is in it."""

    def act() -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()

    return Step(f"remove {path}", act, lambda: not os.path.lexists(path))


def command(text: str, words: Sequence[str | Path], is_done: Callable[[], bool] = lambda: False) -> Step:
    """Run a program. Raises: InstallError with the last line that it says, if it fails."""

    def act() -> None:
        try:
            done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise InstallError(f"{words[0]} is missing") from None
        if done.returncode != 0:
            reason = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
            raise InstallError(f"{Path(words[0]).name} failed: {reason[-1]}")

    return Step(text, act, is_done)


def _id_of(name: str, file: Path) -> int:
    if file.parent.parent == Path("/"):
        with suppress(KeyError):
            return pwd.getpwnam(name).pw_uid if file.name == "passwd" else grp.getgrnam(name).gr_gid
    elif name == "root":
        return 0
    elif file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            fields = line.split(":")
            if fields[0] == name:
                return int(fields[2])
    raise InstallError(f"{file} has no {name}")


def _give(path: Path, mode: int, owner: Owner) -> None:
    path.chmod(mode)
    if os.geteuid() == 0:  # otherwise a package is being made, and its files are given away when it is installed
        os.chown(path, *owner.ids())


def _is_given(path: Path, mode: int, owner: Owner) -> bool:
    try:
        facts = path.lstat()
        return facts.st_mode & 0o7777 == mode and (os.geteuid() != 0 or (facts.st_uid, facts.st_gid) == owner.ids())
    except (FileNotFoundError, InstallError):
        return False
