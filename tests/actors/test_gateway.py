"""The gateway actor: its sessions' effects reach the clients' streams."""

import pytest

from actorserve.actors.gateway import GatewayActor
from actorserve.core.effects import Available, Deliver, Drained, Effect, End
from actorserve.core.messages import Close, Drain, FinishReason, Message
from tests.actors.cluster import ScriptedCore, lone_node


class Streams:
    """Client streams that note what they are given."""

    def __init__(self) -> None:
        self.given: list[Effect] = []

    def perform(self, effect: Deliver | End | Available) -> None:
        self.given.append(effect)


def _gateway(effects: dict[type[Message], list[Effect]], streams: Streams) -> GatewayActor:
    return GatewayActor(ScriptedCore(effects), lone_node("gateway-0", lambda: 0.0), streams)


def test_what_is_for_clients_goes_to_their_streams() -> None:
    """Tokens, ends and the first worker's arrival are handed on, in order."""
    effects: list[Effect] = [Available(), Deliver("r", (1,)), End("r", FinishReason.STOP)]
    streams = Streams()
    gateway = _gateway({Close: effects}, streams)
    gateway.tell(Close("r"))
    gateway.step()
    assert streams.given == effects


def test_a_gateway_does_nothing_else() -> None:
    """An effect of another actor is a bug."""
    gateway = _gateway({Drain: [Drained()]}, Streams())
    gateway.tell(Drain())
    with pytest.raises(TypeError, match="gateway-0 was asked for Drained"):
        gateway.step()
