"""Which local files this server trusts: those that only its own user, or root, could have put there.

Caches hold libraries that are loaded, and weights that are mapped. So a cache lies in a folder that belongs to this
user or to root, and that others cannot write to. The same holds for all folders above it, or others could rename it
(in a folder with the sticky bit, such as /tmp, they cannot). A file in it belongs to one of the two as well, because
the folder may have been open to others before. No symbolic link in a cache is followed, and none above it unless one
of the two made it.
"""

import errno
import os
import stat
from pathlib import Path
from typing import IO, Final

from actorserve.errors import ActorserveError

_FOLDER_MODE: Final = 0o700
_FILE_MODE: Final = 0o600
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_MAX_LINKS: Final = 40
_MAX_PLAIN_BYTES: Final = 16 * 2**20
_ADVICE: Final = "set ACTORSERVE_CACHE to a folder of your own"


class UntrustedError(ActorserveError):
    """Others could have written what is to be read, in one line that says what to do."""


def trusted_folder(folder: Path) -> Path:
    """``folder``, which is made if it is missing, so that only this user may enter it.

    Raises: UntrustedError if others could change what lies in it; OSError if it cannot be made or looked at.
    """
    folder = Path(os.path.abspath(folder))
    missing = []
    above = folder
    while not os.path.lexists(above):
        missing.append(above)
        above = above.parent
    for new in reversed(missing):
        try:
            new.mkdir(mode=_FOLDER_MODE)
        except FileExistsError:
            continue  # another process has just made it
    if folder.is_symlink():
        raise UntrustedError(f"the cache {folder} is a symbolic link; remove it, or set ACTORSERVE_CACHE")
    _check_path(folder, folder, 0)
    return folder


def check_file(file: Path) -> None:
    """Raises: UntrustedError unless ``file`` is a plain file that others could not write; FileNotFoundError; OSError.

    Its folder must be trusted.
    """
    _check_facts(file, file.lstat())


def open_plain(file: Path) -> IO[bytes]:
    """The file, to be read. Opening it never waits, because a running server that reads its keys again would stop.

    Raises: OSError, also if it is a pipe or a device, or too large to be written by a person.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    facts = os.fstat(descriptor)
    if stat.S_ISREG(facts.st_mode) and facts.st_size <= _MAX_PLAIN_BYTES:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EFBIG, f"it has more than {_MAX_PLAIN_BYTES >> 20} MiB", str(file))
    raise OSError(errno.EINVAL, "it is not a plain file", str(file))


def open_lock(file: Path) -> IO[bytes]:
    """The file, to be locked with ``flock``; made if it is missing. Its content stays as it is.

    Its folder must be trusted. Raises: UntrustedError if it is a symbolic link, or others could write it; OSError.
    """
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, _FILE_MODE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UntrustedError(f"{file} is a symbolic link; remove it") from None
        raise
    opened = os.fdopen(descriptor, "r+b", buffering=0)
    try:
        _check_facts(file, os.fstat(descriptor))
    except UntrustedError:
        opened.close()
        raise
    return opened


def _check_facts(file: Path, facts: os.stat_result) -> None:
    if not stat.S_ISREG(facts.st_mode):
        raise UntrustedError(f"{file} is not a plain file; remove it")
    if not _is_ours(facts) or facts.st_mode & _OTHERS_WRITE:
        raise UntrustedError(f"others could have written {file}; remove it")


def _check_path(path: Path, cache: Path, num_links: int) -> None:
    """Check all folders of an absolute path from the root on, and those that links on the way lead to."""
    for folder in (*reversed(path.parents), path):
        facts = folder.lstat()
        if stat.S_ISLNK(facts.st_mode):
            if not _is_ours(facts):
                raise UntrustedError(f"the way to the cache {cache} has a link of another user, {folder}; {_ADVICE}")
            if num_links >= _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(cache))
            target = Path(os.path.abspath(folder.parent / folder.readlink()))
            _check_path(target, cache, num_links + 1)
            continue
        if not stat.S_ISDIR(facts.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
        if not _is_ours(facts):
            raise UntrustedError(f"the cache {cache} lies in {folder}, which belongs to another user; {_ADVICE}")
        is_shared = facts.st_mode & stat.S_ISVTX and folder != cache
        if facts.st_mode & _OTHERS_WRITE and not is_shared:
            raise UntrustedError(
                f"others may write to {folder}, so the cache {cache} is not trusted; chmod go-w {folder}, or {_ADVICE}"
            )


def _is_ours(facts: os.stat_result) -> bool:
    return facts.st_uid in (0, os.geteuid())
