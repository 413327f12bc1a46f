"""Messages by which the cluster's processes find and watch each other."""

from dataclasses import dataclass

from actorserve.core.messages.values import KVAccess, ModelInfo, Peer, Role, Speed


@dataclass(frozen=True, slots=True)
class Hello:
    """Any -> any, first on every link: the sender's role, its address, and what it serves.

    ``kind`` identifies all that a worker's results depend on bit by bit (weights, numeric mode, kernels, ISA or GPU,
    threads): workers of one kind make the same tokens. It is empty for gateways and the coordinator, as are ``model``,
    ``speed`` and ``kv``.
    """

    protocol_version: int
    role: Role
    address: str
    kind: str = ""
    model: ModelInfo | None = None
    answers: int = 0  # the receiver's incarnation that this answers; 0 asks for an answer
    speed: Speed | None = None
    kv: KVAccess | None = None


@dataclass(frozen=True, slots=True)
class Members:
    """c -> all: the known processes, as parallel columns. Each receiver connects to those that it does not know."""

    names: tuple[str, ...]
    incarnations: tuple[int, ...]
    roles: tuple[Role, ...]
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Any -> any: the sender is alive. A peer that is silent for longer than the death watch's patience is dead."""


@dataclass(frozen=True, slots=True)
class PeerUp:
    """Local: the death watch met ``peer``. A PeerDown of its older incarnation, if there was one, precedes this."""

    peer: Peer
    role: Role
    kind: str = ""
    model: ModelInfo | None = None
    speed: Speed | None = None
    kv: KVAccess | None = None


@dataclass(frozen=True, slots=True)
class PeerDown:
    """Local: ``peer`` was silent too long, said goodbye, or was replaced. This incarnation never comes back.

    There is one exception. A process that was fenced (``Fenced``) rejoins as a new incarnation of itself. Its own core
    first sees every peer go down. Then the same incarnations may come up again, because to them the process is new.
    """

    peer: Peer


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Any -> any: the sender shuts down in order; do not wait for its heartbeats."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """Any -> any: the sender regards the receiver's incarnation as dead: silent too long, or older than a known one.

    The sender ignores all of its messages. The receiver has to rejoin as an incarnation above ``incarnation``.
    """

    incarnation: int
