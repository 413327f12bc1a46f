"""Mistakes in the cluster's file that no single entry shows: two hosts of one name, no coordinator, clashing ports."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from actorserve.cluster.words import ip_address
from actorserve.nearest import unknown

COORDINATOR_PORT: Final = 7480
CONSOLE_PORT: Final = 7481
KV_PORT: Final = 7490
"""The defaults."""
MAX_COORDINATORS: Final = 10  # terms end in a coordinator's place in the order (actors.membership.succession)

_MAX_PORT: Final = 65535
_SHARED: Final = {"name": "name", "address": "address", "public_key": "public key"}


def mistakes_among_hosts(values: Mapping[str, Any]) -> list[str]:
    """All of them, a line each. ``values`` are as TOML gives them: what has a wrong type is passed over here, because
    the checks of single entries report it.
    """
    entries = values.get("host")
    hosts = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    if not hosts:
        return ["no hosts: expected a table [[host]] for each host"]
    return [
        *_same(hosts),
        *_coordinators(values.get("coordinators"), hosts),
        *_addresses(hosts),
        *_what_runs(values.get("coordinators"), hosts),
        *_ports(values, hosts),
    ]


def _name(host: Mapping[str, Any]) -> str:
    return str(host.get("name", "without a name"))


def _same(hosts: list[dict[str, Any]]) -> Iterator[str]:
    for key, what in _SHARED.items():
        holders: dict[str, str] = {}
        for host in hosts:
            value = host.get(key)
            if not isinstance(value, str):
                continue
            text = value.lower() if key == "address" else value
            if text in holders:
                yield (
                    f"two hosts are called {value}"
                    if key == "name"
                    else f"hosts {holders[text]} and {_name(host)} have the same {what}"
                )
            holders.setdefault(text, _name(host))


def _coordinators(names: Any, hosts: list[dict[str, Any]]) -> Iterator[str]:
    if not isinstance(names, list):
        return
    if not names:
        yield 'no coordinator: expected the name of a host, such as coordinators = ["alpha"]'
    if len(names) > MAX_COORDINATORS:
        yield f"coordinators: {len(names)} hosts, and at most {MAX_COORDINATORS} are possible"
    yield from (f"coordinators: host {name} stands there twice" for name in _repeated(names))
    known = [_name(host) for host in hosts]
    for name in names:
        if isinstance(name, str) and name not in known:
            yield f"coordinators: host {name} is {unknown(known, name)}"


def _repeated(names: list[Any]) -> list[str]:
    texts = [name for name in names if isinstance(name, str)]
    return sorted({text for text in texts if texts.count(text) > 1})


def _addresses(hosts: list[dict[str, Any]]) -> Iterator[str]:
    found = {_name(host): ip_address(host["address"]) for host in hosts if isinstance(host.get("address"), str)}
    known = {name: address for name, address in found.items() if address is not None}
    local = [name for name, address in known.items() if address.is_loopback]
    if local and len(local) < len(known):
        yield f"host {local[0]} has an address of loopback, at which other hosts cannot reach it"


def _count(host: Mapping[str, Any], key: str) -> int:
    value = host.get(key, 0)
    return value if isinstance(value, int) else 0


def _what_runs(coordinators: Any, hosts: list[dict[str, Any]]) -> Iterator[str]:
    for what in ("gateways", "workers"):
        if all(not _count(host, what) for host in hosts):
            yield f"no host has {what}"
    for host in hosts:
        is_coordinator = isinstance(coordinators, list) and host.get("name") in coordinators
        if not (is_coordinator or _count(host, "gateways") or _count(host, "workers")):
            yield f"host {_name(host)} runs nothing: expected gateways, workers, or its name among the coordinators"


def _ports(values: Mapping[str, Any], hosts: list[dict[str, Any]]) -> Iterator[str]:
    first = values.get("kv_port", KV_PORT)
    named = {
        name: values.get(name, usual)
        for name, usual in (("coordinator_port", COORDINATOR_PORT), ("console_port", CONSOLE_PORT))
    }
    if named["coordinator_port"] == named["console_port"]:
        yield f"coordinator_port and console_port are both {named['console_port']}"
    if not isinstance(first, int):
        return
    for host in hosts:
        last = first + _count(host, "workers") - 1
        if last > _MAX_PORT:
            yield f"host {_name(host)} has {_count(host, 'workers')} workers: there is no port {last} for their KV"
            continue
        for name, port in named.items():
            if isinstance(port, int) and first <= port <= last:
                yield f"{name} {port} is among the ports of KV, {first} to {last}, of host {_name(host)}"
