"""The gateway's sessions as a service: effects reach the answer's stream, and clients' actions reach the core."""

from collections.abc import Sequence

from actorserve.core.effects import Available, Deliver, End
from actorserve.core.gateway.config import GatewayConfig
from actorserve.core.gateway.state import GatewayState
from actorserve.core.messages import (
    Close,
    FinishReason,
    Message,
    ModelInfo,
    Open,
    Peer,
    PeerUp,
    RefusalReason,
    RequestSpec,
    Role,
    SamplingParams,
    WorkerInfo,
)
from actorserve.http.sessions import SessionService
from actorserve.http.stream import AnswerStream


def spec(name: str) -> RequestSpec:
    return RequestSpec(name, (1, 2), SamplingParams(seed=1, max_tokens=5))


class Gateway:
    """A service over real sessions. Keeps what the service injects; all requests share one stream."""

    def __init__(self, max_open_requests: int = 2) -> None:
        self.core = GatewayState(GatewayConfig(1.0, 30.0, 600.0))
        self.service = SessionService(self.core, max_open_requests)
        self.stream = AnswerStream()
        self.injected: list[Message] = []
        self.service.attach(self.injected.append, lambda: 7)

    def submit(self, *names: str) -> None:
        for name in names:
            self.service.submit(spec(name), self.stream)

    async def delivered(self) -> Sequence[Deliver | End]:
        """What has come since the last call."""
        return await self.stream.take(until=0.0)


async def test_a_stream_gets_the_effects_of_its_requests() -> None:
    """Effects reach the answer's stream as they are, in order, and the core is told nothing more of the request."""
    gateway = Gateway()
    gateway.submit("a", "b")
    effects: list[Deliver | End] = [
        Deliver("a", (5, 6), num_cached_tokens=3),
        Deliver("b", (7,)),
        End("a", FinishReason.STOP),
    ]
    for effect in effects:
        gateway.service.perform(effect)
    assert await gateway.delivered() == effects
    gateway.service.release("a")
    assert gateway.injected == [Open(spec("a")), Open(spec("b"))]


async def test_release_closes_once_and_later_effects_are_dropped() -> None:
    """A client that leaves closes its request, once; tokens that were in flight go nowhere."""
    gateway = Gateway()
    gateway.submit("a")
    gateway.service.release("a")
    gateway.service.release("a")
    gateway.service.perform(Deliver("a", (5,)))
    gateway.service.perform(End("a", FinishReason.STOP))
    assert await gateway.delivered() == []
    assert gateway.injected == [Open(spec("a")), Close("a")]


async def test_too_many_open_requests_are_refused_without_reaching_the_core() -> None:
    """Above the limit a request ends as overload; one that leaves makes room."""
    gateway = Gateway(max_open_requests=1)
    gateway.submit("a", "b")
    assert await gateway.delivered() == [End("b", FinishReason.ERROR, RefusalReason.OVERLOADED, 1.0)]
    gateway.service.release("a")
    gateway.submit("c")
    assert gateway.injected == [Open(spec("a")), Close("a"), Open(spec("c"))]


async def test_giving_up_ends_every_request_with_an_error() -> None:
    """When the time to drain is over, open requests are closed and told so, and so are new ones; both are counted."""
    gateway = Gateway()
    gateway.submit("a", "b")
    gateway.service.perform(End("a", FinishReason.STOP))
    gateway.service.give_up()
    gateway.submit("c")
    assert await gateway.delivered() == [
        End("a", FinishReason.STOP),
        End("b", FinishReason.ERROR, RefusalReason.DRAINING, 1.0),
        End("c", FinishReason.ERROR, RefusalReason.DRAINING, 1.0),
    ]
    assert gateway.service.num_given_up == 2
    assert gateway.injected == [Open(spec("a")), Open(spec("b")), Close("b")]


def test_model_is_what_the_largest_worker_serves_and_stays_known() -> None:
    """The model is known since the first worker, with the largest capacity of those up, even while none is up."""
    gateway = Gateway()
    assert gateway.service.model is None
    for name, size in (("worker-0", 10), ("worker-1", 20)):
        gateway.core.handle(PeerUp(Peer(name, 1), Role.WORKER, WorkerInfo("k", ModelInfo("m", 100, size))), 0.0)
    gateway.service.perform(Available())
    assert gateway.service.available.is_set()
    assert gateway.service.model == ModelInfo("m", 100, 20)
    assert gateway.service.num_instances == 2
    gateway.core.peers.workers.clear()
    assert gateway.service.model == ModelInfo("m", 100, 20)
    assert gateway.service.counters()["dropped_frames"] == 7
