"""A host's share of a cluster, as an installation needs it. Standard library only; ``actorserve config check`` finds
the other mistakes of the cluster's file.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.installing.steps import InstallError


@dataclass(frozen=True)
class Share:
    """What runs on the host called ``name``. ``text``: the cluster's file."""

    name: str
    text: str
    has_coordinator: bool
    num_gateways: int
    num_workers: int

    @property
    def units(self) -> str:
        """The units of its processes, as words for a shell."""
        return " ".join(
            (
                "actorserve.target",
                *(["actorserve-coordinator"] if self.has_coordinator else []),
                *_instances("gateway", self.num_gateways),
                *_instances("worker", self.num_workers),
            )
        )


ONE_HOST = Share("", "", has_coordinator=True, num_gateways=1, num_workers=2)
"""A server on one host, with the default number of processes on a CPU."""


def read_share(file: Path, name: str) -> Share:
    """The share of the host called ``name``. Raises: InstallError for a wrong file, or without such a host."""
    try:
        text = file.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise InstallError(f"cannot read the cluster's file {file}: {error}") from None
    entries = values.get("host")
    hosts = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    for host in hosts:
        if host.get("name") == name:
            coordinators = values.get("coordinators")
            has_coordinator = isinstance(coordinators, list) and name in coordinators
            return Share(name, text, has_coordinator, _count(host, "gateways"), _count(host, "workers"))
    known = ", ".join(str(host.get("name")) for host in hosts) or "none"
    raise InstallError(f"{file} has no host {name}: its hosts are {known}")


def _count(host: dict[str, Any], key: str) -> int:
    value = host.get(key, 0)
    return value if isinstance(value, int) else 0


def _instances(role: str, count: int) -> list[str]:
    if count <= 1:
        return [f"actorserve-{role}@0"] * count
    return [f"actorserve-{role}@{{0..{count - 1}}}"]
