"""The gateway's sessions as a service: what the core delivers reaches the stream, and what a client does the core."""

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
)
from actorserve.http.service import Ended, Produced
from actorserve.http.sessions import SessionService


def spec(name: str) -> RequestSpec:
    return RequestSpec(name, (1, 2), SamplingParams(seed=1, max_tokens=5))


class Gateway:
    """A service over real sessions, with what it injects kept."""

    def __init__(self, max_open_requests: int = 2) -> None:
        self.core = GatewayState(GatewayConfig(1.0, 30.0, 600.0))
        self.service = SessionService(self.core, max_open_requests)
        self.injected: list[Message] = []
        self.service.attach(self.injected.append, lambda: 7)


async def test_stream_gives_tokens_and_ends() -> None:
    """Tokens come in order, then the end, and the core is told nothing more of it."""
    gateway = Gateway()
    stream = gateway.service.submit(spec("a"))
    gateway.service.perform(Deliver("a", (5, 6), num_cached_tokens=3))
    gateway.service.perform(Deliver("a", (7,)))
    gateway.service.perform(End("a", FinishReason.STOP))
    assert [item async for item in stream] == [Produced((5, 6), (), 3), Produced((7,)), Ended(FinishReason.STOP)]
    stream.release()
    assert gateway.injected == [Open(spec("a"))]


async def test_release_closes_once_and_what_comes_later_is_dropped() -> None:
    """A client that leaves closes its request, once; tokens that were under way go nowhere."""
    gateway = Gateway()
    stream = gateway.service.submit(spec("a"))
    stream.release()
    stream.release()
    gateway.service.perform(Deliver("a", (5,)))
    gateway.service.perform(End("a", FinishReason.STOP))
    assert gateway.injected == [Open(spec("a")), Close("a")]


async def test_too_many_open_requests_are_refused_without_reaching_the_core() -> None:
    """Past the bound a request ends as overload; one that leaves makes room."""
    gateway = Gateway(max_open_requests=1)
    first = gateway.service.submit(spec("a"))
    refused = [item async for item in gateway.service.submit(spec("b"))]
    assert refused == [Ended(FinishReason.ERROR, RefusalReason.OVERLOADED, 1.0)]
    first.release()
    gateway.service.submit(spec("c"))
    assert gateway.injected == [Open(spec("a")), Close("a"), Open(spec("c"))]


async def test_giving_up_ends_every_stream_with_an_error() -> None:
    """When the drain's time is over, what runs is closed and says so, as does what comes; both are counted."""
    gateway = Gateway()
    finished, running = gateway.service.submit(spec("a")), gateway.service.submit(spec("b"))
    gateway.service.perform(End("a", FinishReason.STOP))
    gateway.service.give_up()
    late = gateway.service.submit(spec("c"))
    drained = Ended(FinishReason.ERROR, RefusalReason.DRAINING, 1.0)
    assert [item async for item in finished] == [Ended(FinishReason.STOP)]
    assert [item async for item in running] == [drained]
    assert [item async for item in late] == [drained]
    assert gateway.service.num_given_up == 2
    assert gateway.injected == [Open(spec("a")), Open(spec("b")), Close("b")]


def test_model_is_what_the_largest_worker_serves_and_stays_known() -> None:
    """The model is known from the first worker on, with the largest capacity of those up, also while none is."""
    gateway = Gateway()
    assert gateway.service.model is None
    for name, size in (("worker-0", 10), ("worker-1", 20)):
        gateway.core.handle(PeerUp(Peer(name, 1), Role.WORKER, "k", ModelInfo("m", 100, size)), 0.0)
    gateway.service.perform(Available())
    assert gateway.service.available.is_set()
    assert gateway.service.model == ModelInfo("m", 100, 20)
    assert gateway.service.num_instances == 2
    gateway.core.peers.workers.clear()
    assert gateway.service.model == ModelInfo("m", 100, 20)
    assert gateway.service.counters()["dropped_frames"] == 7
