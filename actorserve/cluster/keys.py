"""The keys in the cluster's file: which ones the cluster accepts, and what the processes of a host may do."""

from typing import Final

from actorserve.cluster.file import ClusterFile, Host
from actorserve.cluster.words import ip_address
from actorserve.core.messages import Role
from actorserve.errors import SettingsError
from actorserve.wire.trust import Holder, HolderKind, HostKey, KeyPair, PublicKeys, TrustError

_LOOPBACK_NAMES: Final = ("localhost", "localhost.")


def public_keys(cluster: ClusterFile) -> PublicKeys | None:
    """The keys that the cluster accepts; None if it has none, and listens on loopback alone.

    Raises: SettingsError if keys are missing or contradict each other.
    """
    without = [host for host in cluster.hosts if host.public_key is None]
    has_keys = len(without) < len(cluster.hosts) or bool(cluster.operators or cluster.viewers)
    if not has_keys:
        problems = [_beyond_loopback(host, listening) for host, listening in _reachable(cluster)][:1]
    else:
        problems = [
            f"host {host.name} has no public_key, which every host needs if there are keys: `actorserve keys --host "
            f"{host.name}` makes it"
            for host in without
        ]
    if problems:
        raise SettingsError("; ".join(problems), problems)
    if not has_keys:
        return None
    try:
        return PublicKeys(
            {host.name: _host_key(cluster, host) for host in cluster.hosts}, cluster.operators, cluster.viewers
        )
    except TrustError as error:
        raise SettingsError(str(error)) from None


def check_own_key(own: KeyPair, keys: PublicKeys, host: str, *, is_actuator: bool = False) -> None:
    """Raises: SettingsError unless the key pair is the one that the cluster has for the host, or for its actuator."""
    holder = keys.holders().get(own.public_key)
    wanted = Holder(HolderKind.ACTUATOR if is_actuator else HolderKind.HOST, host)
    if holder != wanted:
        raise SettingsError(
            f"the secret key belongs to {holder or 'no host of the cluster'}, and not to {wanted}: its public key is "
            f"{own.public_key}"
        )


def _host_key(cluster: ClusterFile, host: Host) -> HostKey:
    roles = {
        Role.COORDINATOR: host.name in cluster.coordinators,
        Role.GATEWAY: host.gateways > 0,
        Role.WORKER: host.workers > 0,
    }
    return HostKey(host.public_key or "", frozenset(role for role, runs in roles.items() if runs), host.actuator_key)


def _reachable(cluster: ClusterFile) -> list[tuple[Host, str]]:
    """The hosts whose processes other machines can reach, with the addresses at which they listen."""
    listening = [(host, host.bind or host.address) for host in cluster.hosts]
    return [(host, address) for host, address in listening if not _is_loopback(address)]


def _is_loopback(address: str) -> bool:
    number = ip_address(address)
    return address.lower() in _LOOPBACK_NAMES if number is None else number.is_loopback


def _beyond_loopback(host: Host, listening: str) -> str:
    return (
        f"host {host.name} listens at {listening}, where other machines can connect, so every host needs a "
        "public_key: `actorserve keys` makes them"
    )
