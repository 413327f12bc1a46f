"""The gateway actor: its sessions' effects reach the answer's stream, and clients' actions reach the sessions."""

import pytest

from actorserve.actors.gateway import GatewayActor
from actorserve.core.effects import Deliver, Drained, End
from actorserve.core.gateway.config import GatewayConfig
from actorserve.core.gateway.state import GatewayState
from actorserve.core.messages import (
    Close,
    FinishReason,
    Message,
    ModelInfo,
    Open,
    Peer,
    PeerDown,
    PeerUp,
    RefusalReason,
    RequestSpec,
    Role,
    SamplingParams,
    WorkerInfo,
)
from tests.actors.cluster import EntryList, lone_node


def spec(name: str) -> RequestSpec:
    return RequestSpec(name, (1, 2), SamplingParams(seed=1, max_tokens=5))


def worker_up(name: str, max_tokens: int) -> PeerUp:
    return PeerUp(Peer(name, 1), Role.WORKER, WorkerInfo("k", ModelInfo("m", 100, max_tokens)))


class ListStream:
    """A stream that keeps what it is given."""

    def __init__(self) -> None:
        self.effects: list[Deliver | End] = []

    def put(self, effect: Deliver | End) -> None:
        self.effects.append(effect)


class Gateway:
    """A gateway over real sessions, without peers. All of its requests share one stream."""

    def __init__(self, max_open_requests: int = 2) -> None:
        self.stream = ListStream()
        self._journal = EntryList()
        self.node = lone_node("gateway-0", lambda: 0.0, self._journal)
        self.actor = GatewayActor(GatewayState(GatewayConfig(1.0, 30.0, 600.0)), self.node, max_open_requests)

    def submit(self, *names: str) -> None:
        for name in names:
            self.actor.submit(spec(name), self.stream)

    def told(self) -> list[Message]:
        """What the sessions have been told since the start."""
        self.actor.step()
        return [entry.message for entry in self._journal.entries]


def test_a_stream_gets_the_effects_of_its_requests() -> None:
    """Effects reach the answer's stream as they are, in order, and the core is told nothing more of the request."""
    gateway = Gateway()
    gateway.submit("a", "b")
    effects: list[Deliver | End] = [
        Deliver("a", (5, 6), num_cached_tokens=3),
        Deliver("b", (7,)),
        End("a", FinishReason.STOP),
    ]
    for effect in effects:
        gateway.actor.perform(effect)
    assert gateway.stream.effects == effects
    gateway.actor.release("a")
    assert gateway.told() == [Open(spec("a")), Open(spec("b"))]


def test_release_closes_once_and_later_effects_are_dropped() -> None:
    """A client that leaves closes its request, once; tokens that were in flight are dropped."""
    gateway = Gateway()
    gateway.submit("a")
    gateway.actor.release("a")
    gateway.actor.release("a")
    gateway.actor.perform(Deliver("a", (5,)))
    gateway.actor.perform(End("a", FinishReason.STOP))
    assert gateway.stream.effects == []
    assert gateway.told() == [Open(spec("a")), Close("a")]


def test_a_release_tells_that_the_answer_is_complete() -> None:
    """The core hears whether a stop string has ended the answer."""
    gateway = Gateway()
    gateway.submit("a")
    gateway.actor.release("a", is_complete=True)
    assert gateway.told() == [Open(spec("a")), Close("a", is_complete=True)]


def test_too_many_open_requests_are_refused_without_reaching_the_core() -> None:
    """Above the limit a request ends as overload; a released request makes room."""
    gateway = Gateway(max_open_requests=1)
    gateway.submit("a", "b")
    assert gateway.stream.effects == [End("b", FinishReason.ERROR, RefusalReason.OVERLOADED, 1.0)]
    gateway.actor.release("a")
    gateway.submit("c")
    assert gateway.told() == [Open(spec("a")), Close("a"), Open(spec("c"))]


def test_giving_up_ends_every_request_with_an_error() -> None:
    """When the time to drain is over, open and new requests end with an error; the gateway counts both."""
    gateway = Gateway()
    gateway.submit("a", "b")
    gateway.actor.perform(End("a", FinishReason.STOP))
    gateway.actor.give_up()
    gateway.submit("c")
    assert gateway.stream.effects == [
        End("a", FinishReason.STOP),
        End("b", FinishReason.ERROR, RefusalReason.DRAINING, 1.0),
        End("c", FinishReason.ERROR, RefusalReason.DRAINING, 1.0),
    ]
    assert gateway.actor.num_given_up == 2
    assert gateway.told() == [Open(spec("a")), Open(spec("b")), Close("b")]


def test_model_is_that_of_the_largest_worker_and_stays_known() -> None:
    """The model is known since the first worker, with the largest capacity of those up, even while none is up."""
    gateway = Gateway()
    assert gateway.actor.model is None
    for name, size in (("worker-0", 10), ("worker-1", 20)):
        gateway.actor.tell(worker_up(name, size))
    gateway.actor.step()
    assert gateway.actor.available.is_set()
    assert gateway.actor.model == ModelInfo("m", 100, 20)
    assert gateway.actor.num_instances == 2
    for name in ("worker-0", "worker-1"):
        gateway.actor.tell(PeerDown(Peer(name, 1)))
    gateway.actor.step()
    assert gateway.actor.num_instances == 0
    assert gateway.actor.model == ModelInfo("m", 100, 20)


def test_dropped_frames_are_counted() -> None:
    """The counters show the frames that the transport has dropped."""
    gateway = Gateway()
    gateway.node.transport.counts["dropped: unknown tag"] += 7
    assert gateway.actor.counters()["dropped_frames"] == 7


def test_a_gateway_does_nothing_else() -> None:
    """An effect of another actor is a bug."""
    with pytest.raises(TypeError, match="gateway-0 was asked for Drained"):
        Gateway().actor.perform(Drained())
