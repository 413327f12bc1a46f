"""Looks up the addresses in the cluster's file that are names."""

import socket

from actorserve.cluster.file import ClusterFile, Host
from actorserve.cluster.words import ip_address
from actorserve.errors import SettingsError


def unresolvable(cluster: ClusterFile) -> list[str]:
    """The hosts whose address is a name that this machine cannot look up, a line each."""
    problems = []
    for host in cluster.hosts:
        try:
            numeric_address(host.address)
        except SettingsError as error:
            problems.append(f"host {host.name}: {error}")
    return problems


def numeric_address(address: str) -> str:
    """The IP address of ``address``: that of a name is one of IPv4, as every process looks it up.

    Raises: SettingsError if it is a name that cannot be looked up.
    """
    if ip_address(address) is not None:
        return address
    try:
        found = socket.getaddrinfo(address, None, socket.AF_INET, socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise SettingsError(f"address {address} cannot be looked up: {error}") from None
    return str(found[0][4][0])


def listening_address(host: Host) -> str:
    """The IP address at which the host's processes listen. Raises: SettingsError."""
    return numeric_address(host.bind or host.address)
