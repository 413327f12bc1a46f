"""Trust: this process's key pair, the public keys that the cluster accepts, and what the holder of each may send.

Keys are CURVE's: Curve25519, written as 40 characters of Z85. Every host has a key pair, which its processes share; an
actuator of power caps there has one of its own. Operators and viewers have one each, with which their consoles connect.

The name of a process begins with the name of its key's holder: ``alpha/worker-0`` belongs to host alpha. Only the name
``coordinator`` has no such part; it belongs to every host that may run a coordinator.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple

from actorserve.core.messages import Message, Role
from actorserve.errors import ActorserveError
from actorserve.wire.senders import MESSAGES_OF, role_of

MAX_NAME_CHARS: Final = 64
UNKNOWN_KEY: Final = "unknown key"
WRONG_KIND: Final = "not a host's key"
WRONG_PERSON: Final = "not an operator's or viewer's key"
WRONG_HOST: Final = "another host's name"
WRONG_ROLE: Final = "role not allowed on the host"
WRONG_MESSAGE: Final = "message not allowed for the role"
_COORDINATOR_NAME: Final = "coordinator"
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", re.ASCII)
_KEY_CHARS: Final = 40
_Z85: Final = {
    character: value
    for value, character in enumerate(
        "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    )
}
_MAX_KNOWN_SENDERS: Final = 65536


class TrustError(ActorserveError):
    """A key, or the file that holds it, is missing, malformed or unsafe."""


class HolderKind(StrEnum):
    """What a key is for."""

    HOST = "host"
    OPERATOR = "operator"
    VIEWER = "viewer"
    ACTUATOR = "actuator"


class Holder(NamedTuple):
    """The holder of a key, such as host alpha."""

    kind: HolderKind
    name: str

    def __str__(self) -> str:
        return f"{self.kind.value} {self.name}"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public key and its secret key, in Z85. Raises: TrustError if one of them is malformed."""

    public_key: str
    secret_key: str = field(repr=False)

    def __post_init__(self) -> None:
        check_key(self.public_key, "public_key")
        check_key(self.secret_key, "secret_key")


@dataclass(frozen=True, slots=True)
class HostKey:
    """A host's public key, and the roles of the processes that may run there. ``actuator_key`` is that of its actuator
    of power caps, a process that the host's other processes cannot pass for.
    """

    public_key: str
    roles: frozenset[Role] = frozenset(Role)
    actuator_key: str | None = None


@dataclass(frozen=True, slots=True)
class PublicKeys:
    """Every key that the cluster accepts, by the name of its holder. The hosts are in the cluster's order.

    Raises: TrustError for a malformed name or key, and for a name or a key with two holders.
    """

    hosts: Mapping[str, HostKey]
    operators: Mapping[str, str] = field(default_factory=dict)
    viewers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.holders()

    def holders(self) -> dict[str, Holder]:
        """Public key -> its holder."""
        entries = [(Holder(HolderKind.HOST, name), host.public_key) for name, host in self.hosts.items()]
        entries += [(Holder(HolderKind.OPERATOR, name), key) for name, key in self.operators.items()]
        entries += [(Holder(HolderKind.VIEWER, name), key) for name, key in self.viewers.items()]
        names: dict[str, Holder] = {}
        for holder, _ in entries:
            check_name(holder.name)
            if holder.name in names:
                raise TrustError(f"{names[holder.name]} and {holder} have the same name")
            names[holder.name] = holder
        entries += [
            (Holder(HolderKind.ACTUATOR, name), host.actuator_key)
            for name, host in self.hosts.items()
            if host.actuator_key is not None
        ]
        found: dict[str, Holder] = {}
        for holder, key in entries:
            check_key(key, f"the public key of {holder}")
            if key in found:
                raise TrustError(f"{found[key]} and {holder} have the same public key")
            found[key] = holder
        return found


class Trust:
    """What this process believes of keys. ``replace`` changes it, and the next message is checked by the new keys.

    One thread at a time may use it; other threads may call ``holder_of``, ``may_read_kv`` and ``key_of_process``.
    """

    def __init__(self, own: KeyPair, keys: PublicKeys) -> None:
        self.own = own
        self._on_change: list[Callable[[], None]] = []
        self._set(keys)

    @property
    def keys(self) -> PublicKeys:
        return self._keys

    def replace(self, keys: PublicKeys) -> None:
        """Accept exactly ``keys`` from now on."""
        self._set(keys)
        for callback in self._on_change:
            callback()

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` after each ``replace``."""
        self._on_change.append(callback)

    def holder_of(self, public_key: str) -> Holder | None:
        """The holder of a key; None for a key that is not accepted (any more)."""
        return self._holders.get(public_key)

    def may_read_kv(self, public_key: str) -> bool:
        """Whether the key belongs to a host with workers."""
        holder = self._holders.get(public_key)
        if holder is None or holder.kind is not HolderKind.HOST:
            return False
        host = self._keys.hosts.get(holder.name)
        return host is not None and Role.WORKER in host.roles

    def key_of_process(self, name: str) -> str | None:
        """The public key of the process called ``name``; None if its host is unknown.

        ``coordinator`` is on the first host that may run one.
        """
        if name == _COORDINATOR_NAME:
            return next((host.public_key for host in self._keys.hosts.values() if Role.COORDINATOR in host.roles), None)
        host = self._keys.hosts.get(_holder_name(name))
        if host is None:
            return None
        return host.actuator_key if role_of(name) is Role.POWER else host.public_key

    def check_own(self, name: str) -> None:
        """Raises: TrustError unless our key pair is that of the host of the process called ``name``."""
        refusal = self.rights_of(self.own.public_key, name).refusal
        if refusal is not None:
            raise TrustError(f"{name} cannot take part with the key pair of {self.own.public_key}: {refusal}")

    def rights_of(self, public_key: str, sender: str) -> "Rights":
        """What the process called ``sender`` may send, if its frames come with this key."""
        known = self._rights.get((public_key, sender))
        if known is None:
            if len(self._rights) >= _MAX_KNOWN_SENDERS:
                self._rights.clear()
            known = self._rights[public_key, sender] = self._judge(public_key, sender)
        return known

    def _set(self, keys: PublicKeys) -> None:
        self._holders: Mapping[str, Holder] = MappingProxyType(keys.holders())
        self._keys = keys
        self._rights: dict[tuple[str, str], Rights] = {}  # by key and name of the process

    def _judge(self, public_key: str, sender: str) -> "Rights":
        holder = self._holders.get(public_key)
        if holder is None:
            return Rights(UNKNOWN_KEY)
        if holder.kind not in (HolderKind.HOST, HolderKind.ACTUATOR):
            return Rights(WRONG_KIND)
        if sender != _COORDINATOR_NAME and _holder_name(sender) != holder.name:
            return Rights(WRONG_HOST)
        role = role_of(sender)
        is_actuator = holder.kind is HolderKind.ACTUATOR
        if role is None or is_actuator is not (role is Role.POWER):
            return Rights(WRONG_ROLE)
        if not is_actuator and role not in self._keys.hosts[holder.name].roles:
            return Rights(WRONG_ROLE)
        return Rights(None, MESSAGES_OF[role])


class Rights(NamedTuple):
    """What a process may send with a key: ``refusal`` says why it may send nothing; otherwise, it is None."""

    refusal: str | None
    messages: frozenset[type[Message]] = frozenset()


def check_name(name: str) -> None:
    """Raises: TrustError unless ``name`` can name a host, an operator or a viewer."""
    if _NAME.fullmatch(name) is None or len(name) > MAX_NAME_CHARS or name == _COORDINATOR_NAME:
        raise TrustError(
            f"{name[:MAX_NAME_CHARS]!r} cannot be a name: expected at most {MAX_NAME_CHARS} letters, digits, dots, "
            f"dashes and underscores, and not {_COORDINATOR_NAME!r}"
        )


def check_key(key: str, what: str) -> None:
    """Raises: TrustError, which does not repeat the key, unless ``key`` can be a key."""
    if len(key) == _KEY_CHARS and any(character != "0" for character in key):
        with contextlib.suppress(KeyError):
            words = [key[first : first + 5] for first in range(0, _KEY_CHARS, 5)]
            if all(
                functools.reduce(lambda sum_, character: 85 * sum_ + _Z85[character], word, 0) < 2**32 for word in words
            ):
                return
    raise TrustError(f"{what} is not a key: expected the 40 characters that `actorserve keys` prints")


def _holder_name(process: str) -> str:
    return process.partition("/")[0]
