"""Finds the server that a console on the same host talks to: by the runtime folder with its operators' socket."""

import os
import socket
import tempfile
from pathlib import Path
from typing import Final

from actorserve.errors import ActorserveError, SettingsError
from actorserve.processes.child import read_settings
from actorserve.processes.runtime_folder import HOST, SETTINGS
from actorserve.wire.console import CONSOLE_SOCKET, console_address

UNITS_FOLDER: Final = Path("/run/actorserve")
"""The runtime folder of a server that systemd runs (``config/systemd``). Root may enter it, and the server's user."""


class NoServerError(ActorserveError):
    """No server was found, or several."""


def find_address(runtime_dir: Path | None) -> str:
    """The address of the server in ``runtime_dir``; without one, of the only server on this host whose runtime folder
    this user may enter.

    Raises: NoServerError if there is no such server, or if there are several.
    """
    if runtime_dir is not None:
        if not _has_server(runtime_dir):
            raise NoServerError(f"no server has its sockets in {runtime_dir}")
        return console_address(runtime_dir.absolute())
    found = [folder for folder in (UNITS_FOLDER, *_own_folders()) if _has_server(folder)]
    if not found:
        raise NoServerError("no server of yours runs on this host; --runtime-dir or --connect names one")
    if len(found) > 1:
        found = [folder for folder in found if _listens(folder)] or found
    if len(found) > 1:
        options = " or ".join(f"--runtime-dir {folder}{_what_serves(folder)}" for folder in found)
        raise NoServerError(f"several servers run on this host; choose one: {options}")
    return console_address(found[0])


def _has_server(folder: Path) -> bool:
    try:
        return (folder / CONSOLE_SOCKET).is_socket()
    except OSError:  # such as a folder of another user
        return False


def _what_serves(folder: Path) -> str:
    """What a person knows the server in this folder by, in brackets; empty if the folder does not tell."""
    try:
        if (folder / HOST).exists():
            cluster, _, host = (folder / HOST).read_text(encoding="utf-8").partition("/")
            return f" (host {host} of cluster {cluster})"
        settings = read_settings(folder / SETTINGS)
    except (OSError, UnicodeDecodeError, SettingsError):
        return ""
    return f" ({settings.model.name} on port {settings.http.port})"


def _listens(folder: Path) -> bool:
    """Whether a process listens there now. A server that was killed leaves its socket's file behind."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(folder / CONSOLE_SOCKET))
        except OSError:
            return False
    return True


def _own_folders() -> list[Path]:
    """The fresh runtime folders of this user's servers (``processes.runtime_folder``)."""
    folders = sorted(Path(tempfile.gettempdir()).glob("actorserve-*"))
    return [folder for folder in folders if _is_own(folder)]


def _is_own(folder: Path) -> bool:
    try:
        facts = folder.lstat()
    except OSError:
        return False
    return facts.st_uid == os.geteuid() and not facts.st_mode & 0o077 and folder.is_dir() and not folder.is_symlink()
