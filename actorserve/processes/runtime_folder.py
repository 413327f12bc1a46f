"""The runtime folder: sockets, the children's settings, and what gateways have counted.

One server uses a folder at a time. The lock is on the folder itself, and the kernel drops it when the server ends,
however that happens. A server that was killed leaves its files behind; the next one removes them.
"""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from actorserve.core.messages import Role
from actorserve.errors import ActorserveError
from actorserve.settings import ClusterSettings

SETTINGS: Final = "settings.json"
CLUSTER: Final = "cluster.toml"
"""The copies that the children read: their settings, and the cluster's file."""
HOST: Final = "host"
"""The file that says which host's share of which cluster runs there (``host_text``)."""
LAST_KEYS: Final = "keys.toml"
"""The last cluster's file whose keys were good."""

_PREFIX: Final = "actorserve-"
_FRESH_NAME: Final = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}", re.ASCII)
_MAX_PATH_BYTES: Final = 70  # a socket's path has at most 107 bytes, and the rest is for the name of a process


class RuntimeFolderError(ActorserveError):
    """The runtime folder cannot be used."""


@contextlib.contextmanager
def runtime_folder(settings: ClusterSettings, subfolders: Sequence[str] = ()) -> Iterator[Path]:
    """The folder in the settings, or a new one, which only its owner may enter. It holds no files of an earlier server.
    ``subfolders``: the names of those that the server makes in it.

    A new folder is removed at the end. Folders that dead servers have left are removed at the start.

    Raises: RuntimeFolderError for a folder that others may enter, that another server uses, or whose path is too long
    for sockets.
    """
    given = settings.runtime_dir
    if given is None:
        _remove_leaked()
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    else:
        folder = Path(os.path.abspath(given))
        _make_private(folder)
    try:
        if len(os.fsencode(folder)) > _MAX_PATH_BYTES:
            raise RuntimeFolderError(f"the path of the runtime folder {folder} is too long for sockets")
        with _locked(folder):
            _clear(folder, subfolders)
            yield folder
    finally:
        if given is None:
            shutil.rmtree(folder, ignore_errors=True)


def host_text(cluster_id: str, host: str) -> str:
    """What the file ``HOST`` says of the host's share of this cluster."""
    return f"{cluster_id}/{host}"


def folder_of_host(settings: ClusterSettings, cluster_id: str, host: str) -> Path | None:
    """The runtime folder in which the host's share runs now; None if neither the folder in the settings nor a fresh one
    of this user is it.
    """
    given = settings.runtime_dir
    for folder in (*([] if given is None else [given.absolute()]), *_fresh_folders()):
        try:
            if (folder / HOST).read_text(encoding="utf-8") != host_text(cluster_id, host):
                continue
            with _locked(folder):
                pass  # no server uses it any more
        except (OSError, UnicodeDecodeError):
            continue
        except RuntimeFolderError:
            return folder
    return None


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
    except OSError as error:
        raise RuntimeFolderError(f"cannot make the runtime folder {folder}: {error.strerror}") from None
    if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise RuntimeFolderError(f"others may enter the runtime folder {folder}; chmod 700 it, or choose another")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other servers out, because their processes would bind the same addresses and so take ours over."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeFolderError(f"another server uses the runtime folder {folder}; choose another") from None
        yield
    finally:
        os.close(descriptor)


def _clear(folder: Path, subfolders: Sequence[str]) -> None:
    """Remove what an earlier server has left. Other files are not ours, and stay; and so does the socket of the process
    that sets power caps, because that one outlasts a server.
    """
    sockets = [file for file in folder.glob("*.sock") if file.name != f"{Role.POWER.value}.sock"]
    for file in (*sockets, *folder.glob(f"{LAST_KEYS}*"), folder / SETTINGS, folder / CLUSTER, folder / HOST):
        file.unlink(missing_ok=True)
    for name in subfolders:
        shutil.rmtree(folder / name, ignore_errors=True)


def _remove_leaked() -> None:
    """Remove the fresh folders of servers that were killed.

    A folder that a server has just made and not locked yet has no settings in it, and stays.
    """
    for folder in _fresh_folders():
        with contextlib.suppress(OSError, RuntimeFolderError):
            if (folder / SETTINGS).exists():
                with _locked(folder):
                    shutil.rmtree(folder)


def _fresh_folders() -> Iterator[Path]:
    """The fresh folders of this user's servers, which only this user may enter."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            facts = folder.lstat()
            is_ours = facts.st_uid == os.geteuid() and not facts.st_mode & 0o077 and not folder.is_symlink()
            if is_ours and _FRESH_NAME.fullmatch(folder.name):
                yield folder
