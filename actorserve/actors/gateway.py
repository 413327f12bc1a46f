"""The gateway actor: it owns the clients' streams, which outlive workers, migrations and the coordinator."""

from typing import Protocol

from actorserve.actors.cluster_actor import ClusterActor, ClusterCore
from actorserve.actors.node import Node
from actorserve.core.effects import Available, Deliver, Effect, End


class ClientStreams(Protocol):
    """The token streams of the clients' requests (``http.sessions``)."""

    def perform(self, effect: Deliver | End | Available) -> None:
        """Put tokens or an end into a request's stream, or note that requests can be served. Never blocks."""
        ...


class GatewayActor(ClusterActor):
    """Its core (``GatewayState``) holds the sessions; what they decide for their clients goes to ``streams``."""

    def __init__(self, core: ClusterCore, node: Node, streams: ClientStreams) -> None:
        super().__init__(core, node)
        self._streams = streams

    def perform(self, effect: Effect) -> None:
        match effect:
            case Deliver() | End() | Available():
                self._streams.perform(effect)
            case _:
                super().perform(effect)
