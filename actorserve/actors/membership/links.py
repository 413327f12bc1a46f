"""The part of a transport that membership needs."""

from typing import Protocol

from actorserve.core.messages import Message, Peer
from actorserve.wire.envelope import ANY_INCARNATION


class Links(Protocol):
    """Connections to peers (``wire.transport.Transport`` has them)."""

    @property
    def me(self) -> Peer: ...

    def reincarnate(self, incarnation: int) -> None: ...

    def connect(self, peer: Peer, address: str, *, takes_bundles: bool = False) -> bool: ...

    def disconnect(self, peer: Peer) -> None: ...

    def send(self, peer: Peer, message: Message) -> bool: ...


def anyone(name: str) -> Peer:
    """The process called ``name``, in any incarnation. Only a Hello may be sent to this peer."""
    return Peer(name, ANY_INCARNATION)
