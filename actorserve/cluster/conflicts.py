"""Settings that do not fit to a cluster of several hosts."""

from collections.abc import Iterator

from actorserve.cluster.file import ClusterFile
from actorserve.settings import Settings


def conflicts(settings: Settings, cluster: ClusterFile) -> list[str]:
    """What is wrong with these settings together with this cluster's file, a line each."""
    return [*_scaling(settings), *_port(settings.http.port, cluster)]


def _scaling(settings: Settings) -> Iterator[str]:
    if settings.scaling.max_workers is not None and settings.scaling.start_with == "processes":
        yield (
            'scaling.start_with is "processes", which starts workers on one host only: with a cluster\'s file, choose '
            '"systemd" or "command"'
        )


def _port(port: int, cluster: ClusterFile) -> Iterator[str]:
    for host in cluster.hosts:
        if host.gateways == 0:
            continue
        if port == cluster.coordinator_port and host in cluster.coordinator_hosts:
            yield f"http.port is {port}, which is the coordinator's port on host {host.name}"
        if port == cluster.console_port and host in cluster.coordinator_hosts:
            yield f"http.port is {port}, which is the port of consoles on host {host.name}"
        if cluster.kv_port <= port < cluster.kv_port + host.workers:
            yield f"http.port is {port}, which is a port of KV on host {host.name}"
