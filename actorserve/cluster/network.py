"""Where the processes of a cluster listen, and the addresses at which they reach each other.

Without a cluster's file all processes are on one host, and listen at ipc sockets in the runtime folder. With one they
listen on tcp. The coordinator's port and those of KV are fixed, so that firewalls can let them through; other sockets
take free ports, which the processes tell each other.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from actorserve.cluster.file import ClusterFile
from actorserve.cluster.resolving import listening_address

COORDINATOR: Final = "coordinator"
"""The name of a coordinator's process, after that of its host."""


class Place(NamedTuple):
    """Where a socket listens. Peers reach a tcp socket at ``announced_host``, and at the port that it has taken."""

    bind: str
    announced_host: str = ""

    def announced(self, bound: str) -> str:
        """The address for peers. ``bound`` is where the socket listens now, with its port."""
        return f"tcp://{_in_url(self.announced_host)}:{bound.rpartition(':')[2]}" if self.announced_host else bound


class Network(Protocol):
    """The cluster's addresses, as one process needs them. ``cluster_id`` is empty without a cluster's file."""

    @property
    def cluster_id(self) -> str: ...

    @property
    def coordinators(self) -> Mapping[str, str]:
        """Where coordinators are reached, by name, in the order in which they serve."""
        ...

    def coordinator(self) -> Place:
        """Where this host's coordinator listens. Raises: SettingsError."""
        ...

    def console(self) -> Place | None:
        """Where the coordinator serves consoles on other hosts; None if it serves none. Raises: SettingsError."""
        ...

    def process(self, name: str) -> Place:
        """Where the gateway or worker called ``name`` listens. Raises: SettingsError."""
        ...

    def kv(self, name: str, index: int) -> Place:
        """Where the worker called ``name``, this host's worker number ``index``, serves KV. Raises: SettingsError."""
        ...


class LocalNetwork:
    """One host, with ipc sockets in ``runtime_dir``."""

    cluster_id = ""

    def __init__(self, runtime_dir: Path) -> None:
        self._runtime_dir = runtime_dir

    @property
    def coordinators(self) -> Mapping[str, str]:
        return {COORDINATOR: self.coordinator().bind}

    def coordinator(self) -> Place:
        return self.process(COORDINATOR)

    def console(self) -> Place | None:
        return None

    def process(self, name: str) -> Place:
        return Place(f"ipc://{self._runtime_dir}/{name}.sock")

    def kv(self, name: str, index: int) -> Place:
        return Place(f"ipc://{self._runtime_dir}/{name}.kv.sock")


class HostNetwork:
    """The hosts of ``cluster``, seen from the host called ``host``. Raises: SettingsError for an unknown host."""

    def __init__(self, cluster: ClusterFile, host: str) -> None:
        self._cluster = cluster
        self._host = cluster.host(host)

    @property
    def cluster_id(self) -> str:
        return self._cluster.id

    @property
    def coordinators(self) -> Mapping[str, str]:
        port = self._cluster.coordinator_port
        return {
            f"{host.name}/{COORDINATOR}": f"tcp://{_in_url(host.address)}:{port}"
            for host in self._cluster.coordinator_hosts
        }

    def coordinator(self) -> Place:
        return self._place(str(self._cluster.coordinator_port))

    def console(self) -> Place | None:
        has_callers = self._cluster.operators or self._cluster.viewers
        return self._place(str(self._cluster.console_port)) if has_callers else None

    def process(self, name: str) -> Place:
        return self._place("*")

    def kv(self, name: str, index: int) -> Place:
        return self._place(str(self._cluster.kv_port + index))

    def _place(self, port: str) -> Place:
        return Place(f"tcp://{_in_url(listening_address(self._host))}:{port}", self._host.address)


def console_addresses(cluster: ClusterFile) -> dict[str, str]:
    """Host -> where an operator on another host reaches its coordinator, in the coordinators' order."""
    return {host.name: f"tcp://{_in_url(host.address)}:{cluster.console_port}" for host in cluster.coordinator_hosts}


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
