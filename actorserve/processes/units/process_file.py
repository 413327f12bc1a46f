"""How to start each process of a server, kept in the runtime folder for units of systemd.

Memory, cores and devices are divided once, before any worker starts, because a worker cannot know how much the others
will take. So one unit prepares (``write_processes``), and then each process is a unit, which ``become`` turns into it.
"""

import argparse
import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from actorserve.errors import SettingsError

if TYPE_CHECKING:  # become needs none of it, and a unit starts again sooner without it
    from actorserve.processes.supervision import SupervisionTree

_FILE: Final = "processes.json"


def write_processes(tree: "SupervisionTree", folder: Path) -> None:
    """Keep the command and the environment of each process of ``tree``, spare ones too, in the runtime folder."""
    specs = {
        _short(spec.name): {"command": spec.command, "environment": dict(spec.environment)}
        for spec in (*tree.children, *tree.spare)
    }
    unfinished = folder / f"{_FILE}.new"
    unfinished.write_text(json.dumps(specs, indent=2), encoding="utf-8")
    unfinished.replace(folder / _FILE)


def become(name: str, folder: Path) -> NoReturn:
    """Replace this program by the process called ``name`` (without its host).

    As long as the process runs it holds a share of the folder's lock, so that no server with a supervisor takes over
    its sockets.

    Raises: SettingsError, if nothing was prepared, there is no such process, or a supervised server uses the folder.
    """
    try:
        specs = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"nothing is prepared in {folder}: {error}; first: actorserve serve --prepare {folder}"
        ) from None
    if name not in specs:
        raise SettingsError(f"there is no process {name}: the settings have {', '.join(specs)}")
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SettingsError(f"another server uses the runtime folder {folder}") from None
    os.set_inheritable(descriptor, True)
    command = specs[name]["command"]
    os.execve(command[0], command, {**os.environ, **specs[name]["environment"]})


def main(arguments: Sequence[str]) -> NoReturn:
    """``actorserve process``. Raises: SettingsError, as ``become``."""
    parser = argparse.ArgumentParser(
        prog="actorserve process",
        description="Run one process of a server that `actorserve serve` or `host` has prepared (--prepare DIR).",
    )
    parser.add_argument("name", metavar="NAME", help="coordinator, gateway-0, worker-0, ...")
    parser.add_argument("--runtime-dir", type=Path, required=True, metavar="DIR", help="folder that was prepared")
    parsed = parser.parse_args(arguments)
    become(parsed.name, parsed.runtime_dir)


def _short(name: str) -> str:
    return name.rpartition("/")[2]
