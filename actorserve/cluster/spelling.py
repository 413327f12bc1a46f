"""Misspelt keys of the cluster's file.

The other checks read a misspelt key as the one that was meant, because otherwise they would also tell what seems to be
missing: a host with ``wokers = 2`` has no workers, and so it runs nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from actorserve.nearest import nearest, unknown


def respelled(
    values: Mapping[str, Any], keys: Sequence[str], host_keys: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """The file's values with known keys only, and a line for each other key. A value whose key is nearly a known one
    stands under the known one, if that has no value of its own; another is left out.
    """
    top, misspelt = _table(values, keys)
    problems = [f"{key}: {unknown(keys, key)}" for key in misspelt]
    hosts = top.get("host")
    if isinstance(hosts, list):
        top["host"] = list(hosts)
        for index, host in enumerate(hosts):
            if isinstance(host, dict):
                top["host"][index], misspelt = _table(host, host_keys)
                problems += [f"{host_at(top['host'], index)}: {key}: {unknown(host_keys, key)}" for key in misspelt]
    return top, problems


def host_at(hosts: Sequence[Any], index: int) -> str:
    """What a message calls a host: its name, or its number from 1 if it has none."""
    host = hosts[index]
    name = host.get("name") if isinstance(host, dict) else None
    return f"host {name if isinstance(name, str) else index + 1}"


def _table(values: Mapping[str, Any], known: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """A table with known keys only, and the keys that were not known."""
    table = {key: value for key, value in values.items() if key in known}
    misspelt = [key for key in values if key not in known]
    for key in misspelt:
        meant = nearest(known, key)
        if meant is not None:
            table.setdefault(meant, values[key])
    return table, misspelt
