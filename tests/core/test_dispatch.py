"""Freeness and dispatch: the definitions of Llumnix's Algorithm 1, and the dispatcher's own account."""

from actorserve.core.cluster import ClusterConfig, ClusterState
from actorserve.core.dispatch import InstanceView, choose_instance
from actorserve.core.effects import Send
from actorserve.core.freeness import freeness, virtual_usage_bytes
from actorserve.core.messages import (
    LoadReport,
    ModelInfo,
    Peer,
    PeerDown,
    PeerUp,
    Place,
    Placed,
    RefusalReason,
    Refused,
    RequestSpec,
    Role,
    SamplingParams,
    Tick,
    Unplace,
)
from actorserve.core.request import Request

GATEWAY = Peer("gateway-0", 1)
MODEL = ModelInfo("m", 100, 1000)


def request(num_tokens: int, blocks: int, priority: int = 0) -> Request:
    spec = RequestSpec("r", (1,) * num_tokens, SamplingParams(0, 5), priority=priority)
    made = Request(spec, 1, GATEWAY)
    made.blocks = list(range(blocks))
    return made


def report(sequence: int = 0, used: int = 0, running: int = 0, **fields: object) -> LoadReport:
    return LoadReport(sequence, running, 0, 1000, used, used, 10, 4, 0, **fields)  # type: ignore[arg-type]


def view(name: str, kind: str = "k", **fields: int) -> InstanceView:
    return InstanceView(Peer(name, 1), kind, MODEL, report(**fields))


def test_virtual_usage_counts_held_blocks_and_the_head_of_the_line() -> None:
    """Running requests count what they hold; of those waiting, only the first in order counts, with its demand."""
    order = [request(8, 2), request(9, 0), request(100, 0), request(4, 1)]
    assert virtual_usage_bytes(order, 4, 10, {}) == (2 + 1) * 10 + 3 * 10


def test_headroom_is_shared_by_the_requests_of_a_priority() -> None:
    """Each running request of a priority adds headroom over their number: in sum, the headroom once."""
    order = [request(4, 1, priority=1), request(4, 1, priority=1), request(4, 1)]
    assert virtual_usage_bytes(order, 4, 10, {1: 500}) == 30 + 500


def test_freeness_is_what_is_left_a_running_request() -> None:
    """F = (M - V) / max(1, B), negative when demand exceeds memory, minus infinity when terminating."""
    assert freeness(1000, 400, 3) == 200
    assert freeness(1000, 400, 0) == 600
    assert freeness(1000, 1400, 2) == -200
    assert freeness(1000, 0, 0, terminating=True) == float("-inf")


def test_dispatch_goes_to_the_freest() -> None:
    """The highest freeness wins."""
    chosen = choose_instance([view("a", used=500, running=2), view("b", used=500, running=4)], Place("r", 1, 4))
    assert chosen is not None
    assert chosen.peer.name == "a"


def test_dispatch_prefers_the_kind_that_made_the_tokens() -> None:
    """A request that moves stays within its kind while one of it is there, even a busier one."""
    busy, free = view("a", kind="x", used=900, running=9), view("b", kind="y")
    place = Place("r", 2, 4, kind="x")
    assert choose_instance([busy, free], place) is busy
    assert choose_instance([free], place) is free


def test_dispatch_avoids_the_instance_that_failed_the_draining_and_the_silent() -> None:
    """Never to the instance that just failed the request, nor to one that terminates or has not reported."""
    failed, silent = view("a"), InstanceView(Peer("b", 1), "k", MODEL)
    draining = InstanceView(Peer("c", 1), "k", MODEL, report(draining=True))
    assert choose_instance([failed, silent, draining], Place("r", 2, 4, avoid=failed.peer)) is None


class Coordinator:
    """A ClusterState with two instances that have reported."""

    def __init__(self, num_instances: int = 2) -> None:
        self.state = ClusterState(ClusterConfig(max_waiting_requests=2, no_instance_timeout_s=30.0, retry_s=1.0))
        self.workers = [Peer(f"worker-{i}", 1) for i in range(num_instances)]
        for peer in self.workers:
            self.state.handle(PeerUp(peer, Role.WORKER, "k", MODEL), 0.0)
            self.state.handle(report(), 0.0, peer)

    def place(self, name: str, num_tokens: int = 40, epoch: int = 1, now: float = 0.0) -> Placed:
        (effect,) = self.state.handle(Place(name, epoch, num_tokens), now, GATEWAY)
        assert isinstance(effect, Send)
        assert isinstance(effect.message, Placed)
        return effect.message


def test_burst_between_two_reports_is_spread() -> None:
    """Placements not yet reported count as load, so a burst does not pile up on one instance."""
    coordinator = Coordinator()
    names = [coordinator.place(f"r{i}").instance.name for i in range(6)]
    assert names.count("worker-0") == 3


def test_report_takes_over_from_the_account() -> None:
    """What a newer report has seen is no longer counted twice; an old report changes nothing."""
    coordinator = Coordinator(1)
    worker = coordinator.workers[0]
    coordinator.place("r1")
    instance = coordinator.state.instances[worker]
    assert instance.freeness() == 1000 - 100
    coordinator.state.handle(report(1, used=100, running=1, accepted=("r1",)), 0.1, worker)
    assert instance.freeness() == 900
    coordinator.state.handle(report(1, used=0), 0.2, worker)
    assert instance.freeness() == 900


def test_account_of_a_lost_placement_expires() -> None:
    """A placement that no report ever confirms stops counting."""
    coordinator = Coordinator(1)
    coordinator.place("r1")
    deadline = coordinator.state.next_deadline()
    assert deadline == 5.0
    coordinator.state.handle(Tick(), 5.0)
    assert coordinator.state.next_deadline() is None


def test_place_may_be_repeated() -> None:
    """The same question gets the same answer and counts once; a new epoch is a new question."""
    coordinator = Coordinator()
    first = coordinator.place("r1")
    assert coordinator.place("r1") == first
    assert sum(len(view.under_way) for view in coordinator.state.instances.values()) == 1
    coordinator.place("r1", epoch=2)
    assert sum(len(view.under_way) for view in coordinator.state.instances.values()) == 1


def test_requests_wait_for_an_instance_up_to_a_bound_and_a_deadline() -> None:
    """With nobody there requests wait; they are refused past the bound, and past the deadline."""
    coordinator = Coordinator(0)
    state = coordinator.state
    assert state.handle(Place("r1", 1, 4), 0.0, GATEWAY) == []
    assert state.handle(Place("r2", 1, 4), 0.0, GATEWAY) == []
    refused = Refused("r3", 1, RefusalReason.OVERLOADED, 1.0)
    assert state.handle(Place("r3", 1, 4), 0.0, GATEWAY) == [Send(GATEWAY, refused)]
    state.handle(Unplace("r2", 1), 1.0, GATEWAY)
    assert state.handle(Tick(), 30.0) == [Send(GATEWAY, Refused("r1", 1, RefusalReason.NO_INSTANCE, 1.0))]


def test_waiting_requests_go_to_the_first_instance_that_reports() -> None:
    """A worker that joins takes what waits, in order of arrival."""
    coordinator = Coordinator(0)
    state = coordinator.state
    state.handle(Place("r1", 1, 4), 0.0, GATEWAY)
    state.handle(Place("r2", 1, 4), 0.0, GATEWAY)
    worker = Peer("worker-0", 1)
    assert state.handle(PeerUp(worker, Role.WORKER, "k", MODEL), 1.0) == []
    effects = state.handle(report(), 1.0, worker)
    assert effects == [Send(GATEWAY, Placed("r1", 1, worker)), Send(GATEWAY, Placed("r2", 1, worker))]


def test_dead_peers_are_forgotten() -> None:
    """A dead worker gets nothing more; a dead gateway's requests neither wait nor count."""
    coordinator = Coordinator(1)
    coordinator.place("r1")
    coordinator.state.handle(PeerDown(GATEWAY), 0.0)
    assert not coordinator.state.instances[coordinator.workers[0]].under_way
    coordinator.state.handle(PeerDown(coordinator.workers[0]), 0.0)
    assert coordinator.state.handle(Place("r2", 1, 4), 0.0, GATEWAY) == []
    coordinator.state.handle(PeerDown(GATEWAY), 0.0)
    assert not coordinator.state.waiting


def test_too_large_for_every_instance_is_refused_at_once() -> None:
    """A request that no known instance can ever hold does not wait."""
    coordinator = Coordinator()
    effects = coordinator.state.handle(Place("r1", 1, 1001), 0.0, GATEWAY)
    assert effects == [Send(GATEWAY, Refused("r1", 1, RefusalReason.TOO_LARGE, 1.0))]
