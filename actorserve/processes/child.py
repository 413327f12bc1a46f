"""Runs a child process's ``main`` with its settings and its log, and reports a failure in one line."""

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from actorserve import logs
from actorserve.cluster.file import read_cluster_file
from actorserve.cluster.network import HostNetwork, LocalNetwork, Network
from actorserve.errors import ActorserveError, SettingsError
from actorserve.processes.reload import Reloads
from actorserve.processes.status import Reporter, attach
from actorserve.processes.units.systemd import attach_to_systemd
from actorserve.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Child:
    """The arguments of a child process's ``main``. At most ``count`` processes have its role here; ``index`` is its
    number. In a cluster of several hosts, ``cluster_file`` describes them, and ``host`` is the name of this one. It is
    the copy of ``cluster_source``, which changes of keys are read from. ``key_file``: None if the cluster has no keys.

    ``settings`` are resolved: model path, device, threads, memory, number of workers and port are filled in. ``main``
    adds to ``reloads`` what it reads again after a SIGHUP, and starts them on its event loop.
    """

    name: str
    settings: Settings
    runtime_dir: Path
    status: Reporter
    index: int = 0
    count: int = 1
    cluster_file: Path | None = None
    host: str = ""
    cluster_source: Path | None = None
    key_file: Path | None = None
    reloads: Reloads = field(default_factory=Reloads)

    @property
    def network(self) -> Network:
        """Where the cluster's processes listen. Raises: SettingsError if the cluster's file is wrong."""
        if self.cluster_file is None:
            return LocalNetwork(self.runtime_dir)
        return HostNetwork(read_cluster_file(self.cluster_file), self.host)

    @property
    def file_name(self) -> str:
        """The name without its host, for files in the runtime folder."""
        return self.name.rpartition("/")[2]


def command_line(
    name: str,
    settings_file: Path,
    runtime_dir: Path,
    index: int = 0,
    count: int = 1,
    *,
    cluster_file: Path | None = None,
    host: str = "",
    cluster_source: Path | None = None,
    key_file: Path | None = None,
) -> tuple[str, ...]:
    """The arguments on the command line, from which ``run_child`` makes the ``Child``."""
    return (
        *("--settings", str(settings_file), "--runtime-dir", str(runtime_dir), "--name", name),
        *("--index", str(index), "--count", str(count)),
        *(() if cluster_file is None else ("--cluster", str(cluster_file), "--host", host)),
        *(() if cluster_source is None else ("--cluster-source", str(cluster_source))),
        *(() if key_file is None else ("--key", str(key_file))),
    )


def write_settings(settings: Settings, file: Path) -> None:
    """Write the settings to a file for the children, which read it with ``read_settings``."""
    file.write_text(settings.model_dump_json(indent=2), encoding="utf-8")


def read_settings(file: Path) -> Settings:
    """Raises: SettingsError."""
    try:
        return Settings.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise SettingsError(f"cannot read settings from {file}: {error}") from None


def _parse(program: str, arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=program, description="One process of actorserve, started by its supervisor.")
    parser.add_argument("--settings", type=Path, required=True, metavar="FILE", help="resolved settings (JSON)")
    parser.add_argument("--runtime-dir", type=Path, required=True, metavar="DIR", help="folder of the sockets")
    parser.add_argument("--name", required=True, help="this process's name, which stays the same after a restart")
    parser.add_argument("--index", type=int, default=0, help="number of this process among those of its role, from 0")
    parser.add_argument("--count", type=int, default=1, help="maximum number of processes of this role")
    parser.add_argument("--cluster", type=Path, metavar="FILE", help="the cluster's file, if it has several hosts")
    parser.add_argument("--host", default="", metavar="NAME", help="the name of this host in the cluster's file")
    parser.add_argument("--cluster-source", type=Path, metavar="FILE", help="the file that --cluster is a copy of")
    parser.add_argument("--key", type=Path, metavar="FILE", help="the host's secret key, if the cluster has keys")
    return parser.parse_args(arguments)


def run_child(program: str, arguments: Sequence[str], main: Callable[[Child], None]) -> int:
    """Run ``main`` as a child process until it returns. Returns the exit status.

    An ActorserveError or an OSError from ``main`` is reported to the parent in one line. Any other error is a bug, and
    its traceback goes to stderr.
    """
    reloads = Reloads()
    reloads.catch_early()
    reporter = attach()
    if not reporter.is_heard:
        reporter = attach_to_systemd()
    parsed = _parse(program, arguments)
    logs.configure(parsed.name)
    try:
        settings = read_settings(parsed.settings)
        logs.configure(parsed.name, settings.log.level, settings.log.format)
        main(
            Child(
                name=parsed.name,
                settings=settings,
                runtime_dir=parsed.runtime_dir,
                status=reporter,
                index=parsed.index,
                count=parsed.count,
                cluster_file=parsed.cluster,
                host=parsed.host,
                cluster_source=parsed.cluster_source,
                key_file=parsed.key,
                reloads=reloads,
            )
        )
    except (ActorserveError, OSError) as error:
        why = str(error)
    except ExceptionGroup as group:  # a TaskGroup wraps its tasks' exceptions
        expected, bugs = group.split((ActorserveError, OSError))
        if bugs is not None or expected is None:
            raise
        why = _first_text(expected)
    else:
        return 0
    reporter.failed(why)
    if not reporter.is_heard:
        logger.error("%s", why)
    return 1


def _first_text(group: BaseExceptionGroup[Exception]) -> str:
    first = group.exceptions[0]
    return _first_text(first) if isinstance(first, BaseExceptionGroup) else str(first)
