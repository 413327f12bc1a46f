"""While the coordinator is gone gateways place requests themselves, and no request is served twice when it is back."""

from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from actorserve.core.effects import Effect, End, Send
from actorserve.core.instance.state import InstanceState
from actorserve.core.messages import (
    Close,
    Cordon,
    Finished,
    FinishReason,
    InstanceRole,
    ModelInfo,
    Open,
    Peer,
    PeerDown,
    PeerUp,
    Place,
    Placed,
    RefusalReason,
    Refused,
    Release,
    Role,
    Start,
    Started,
    Tick,
    Tokens,
    Unplace,
    WorkerInfo,
)
from tests.core.harness.fallback import BLOCK_TOKENS, NUM_BLOCKS, alone, knowing, report, spec, started
from tests.core.harness.gateway import COORDINATOR, MODEL, A, B
from tests.core.world.world import COORDINATOR as COORDINATOR_NAME, RETRY_S, World

C = Peer("worker-2", 1)


def test_requests_go_to_the_freest_at_once() -> None:
    """While the coordinator is gone a new request starts at once, on the freest worker by the last reports."""
    gateway = alone({A: report(num_free_blocks=3), B: report(num_free_blocks=8)})
    assert started(gateway.handle(Open(spec("r")), 0.1)) == [("r", B, 1)]
    assert gateway.handle(Started("r", 1), 0.2, B) == []
    assert gateway.handle(Tick(), 1.2) == []
    assert gateway.state.counts.num_placed_by_fallback == 1


def test_requests_that_wait_start_when_the_coordinator_goes() -> None:
    """When the coordinator dies, requests without a worker start, the more urgent first, with their waiting times;
    running ones notice nothing.
    """
    gateway = knowing({A: report()})
    for name, priority in (("late", 1), ("runs", 0), ("urgent", 0)):
        gateway.handle(Open(spec(name, priority=priority)), 0.0)
    gateway.handle(Placed("runs", 1, A), 0.0, COORDINATOR)
    gateway.handle(Started("runs", 1), 0.0, A)
    effects = gateway.handle(PeerDown(COORDINATOR), 0.75)
    assert started(effects) == [("urgent", A, 1), ("late", A, 1)]
    starts = [effect.message for effect in effects if isinstance(effect, Send) and isinstance(effect.message, Start)]
    assert [start.attained.waited_s for start in starts] == [0.75, 0.75]


def test_its_own_account_spreads_a_burst() -> None:
    """Between two reports a burst is spread until all room is used up, because each sent request counts."""
    gateway = alone({A: report(), B: report()})
    placed = [started(gateway.handle(Open(spec(f"r{i}")), 0.0)) for i in range(2 * NUM_BLOCKS + 3)]
    workers = [where[0][1] for where in placed if where]
    assert Counter(workers) == {A: NUM_BLOCKS, B: NUM_BLOCKS}
    assert Counter(workers[:NUM_BLOCKS]) == {A: NUM_BLOCKS // 2, B: NUM_BLOCKS // 2}
    assert placed[2 * NUM_BLOCKS :] == [[], [], []]


def test_gateways_do_not_herd() -> None:
    """A hundred gateways that know the same reports, and not of each other, spread their requests over the workers."""
    workers = {Peer(f"worker-{number:02}", 1): report() for number in range(100)}
    placed: Counter[Peer] = Counter()
    for number in range(100):
        state = alone(workers)
        for name in (f"{number}-a", f"{number}-b"):
            ((_, worker, _),) = started(state.handle(Open(spec(name)), 0.0))
            placed[worker] += 1
    assert max(placed.values()) <= 8
    assert len(placed) >= 75


def test_gateways_do_not_herd_to_one_token_instance() -> None:
    """A hundred gateways that know the same reports name many token instances for the tokens after their prompts."""
    roles = InstanceRole.PROMPT, InstanceRole.TOKEN
    workers = {Peer(f"worker-{number:02}", 1): report(role=roles[number % 2]) for number in range(40)}
    named: Counter[Peer] = Counter()
    for number in range(100):
        for effect in alone(workers).handle(Open(spec(f"r{number}")), 0.0):
            if isinstance(effect, Send) and isinstance(effect.message, Start) and effect.message.token_instance:
                named[effect.message.token_instance] += 1
    assert sum(named.values()) == 100
    assert max(named.values()) <= 15
    assert len(named) >= 15


@pytest.mark.parametrize("ends", [False, True])
def test_a_request_that_ends_before_its_handoff_counts_no_more_without_a_coordinator(ends: bool) -> None:
    """B is the freer token instance, except while a request is on its way there."""
    free, busy = (report(num_free_blocks=number, role=InstanceRole.TOKEN) for number in (9, 8))
    state = alone({A: report(role=InstanceRole.PROMPT), B: free, C: busy})
    state.handle(Open(spec("r", num_blocks=2)), 0.0)
    assert state.state.sessions["r"].token_instance == B
    state.handle(Started("r", 1), 0.0, A)
    if ends:
        state.handle(Tokens(("r",), (1,), (0,), (7,), ()), 0.1, A)
        state.handle(Finished("r", 1, FinishReason.STOP, 1), 0.1, A)
    state.handle(Open(spec("s", num_blocks=2)), 0.1)
    assert state.state.sessions["s"].token_instance == (B if ends else C)


def test_two_drawn_workers_are_compared_by_their_load() -> None:
    """A request goes to the freer one of two drawn workers, so a worker that is busier than all others gets none."""
    workers = {Peer(f"worker-{number}", 1): report(num_free_blocks=3 if number else 2) for number in range(5)}
    for number in range(50):
        ((_, worker, _),) = started(alone(workers).handle(Open(spec(f"r{number}")), 0.0))
        assert worker.name != "worker-0"


def test_a_silent_worker_gets_nothing() -> None:
    """A worker whose last report is older than ``report_ttl_s`` gets no requests until it reports again."""
    state = knowing({A: report(num_free_blocks=9), B: report(num_free_blocks=2)}, report_ttl_s=2.0)
    state.handle(PeerDown(COORDINATOR), 0.0)
    state.handle(report(2, num_free_blocks=2), 1.5, B)
    assert started(state.handle(Open(spec("r")), 2.5)) == [("r", B, 1)]
    state.handle(report(2, num_free_blocks=9), 2.6, A)
    assert started(state.handle(Open(spec("s")), 2.7)) == [("s", A, 1)]


def test_a_bounded_number_waits_at_each_worker() -> None:
    """A worker gets no more requests than may wait there, however much memory it has."""
    gateway = alone({A: report(num_waiting=1)}, max_queue=3)
    assert [bool(gateway.handle(Open(spec(f"r{i}")), 0.0)) for i in range(3)] == [True, True, False]


def test_reports_of_room_start_waiting_requests() -> None:
    """A report of room starts waiting requests by priority and then by arrival; shorter ones pass a long one."""
    gateway = alone({A: report(num_free_blocks=0)})
    for name, num_blocks, priority in (("low", 1, 5), ("long", 4, 0), ("first", 1, 0), ("second", 1, 0)):
        assert gateway.handle(Open(spec(name, num_blocks, priority)), 0.0) == []
    assert started(gateway.handle(report(2, num_free_blocks=1), 0.1, A)) == [("first", A, 1)]
    # The first request's block still counts as in flight.
    assert gateway.handle(report(3, num_free_blocks=1), 0.2, A) == []
    assert started(gateway.handle(report(4, num_free_blocks=2, accepted=("first",)), 0.3, A)) == [
        ("second", A, 1),
        ("low", A, 1),
    ]
    effects = gateway.handle(report(5, num_free_blocks=4, accepted=("second", "low")), 0.5, A)
    assert started(effects) == [("long", A, 1)]


def test_waiting_requests_are_scanned_once_for_reports_that_come_together() -> None:
    """Reports that follow each other closely cause one scan of the waiting requests. The next report after a pause
    starts the requests that were skipped.
    """
    gateway = alone({A: report(num_free_blocks=0), B: report(num_free_blocks=0)})
    for name in ("first", "second", "third"):
        assert gateway.handle(Open(spec(name)), 0.0) == []
    assert started(gateway.handle(report(2, num_free_blocks=1), 1.0, A)) == [("first", A, 1)]
    slack_s = gateway.state.config.retry_slack_s
    assert gateway.handle(report(2, num_free_blocks=1), 1.0 + slack_s / 2, B) == []
    assert started(gateway.handle(report(3, num_free_blocks=1), 1.0 + slack_s, B)) == [("second", B, 1)]


def test_room_that_no_request_fits_into_causes_no_scan() -> None:
    """A report of less room than the shortest waiting request needs causes no scan, so the next report does, however
    soon it comes.
    """
    gateway = alone({A: report(num_free_blocks=0), B: report(num_free_blocks=0)})
    for name, num_blocks in (("long", 5), ("shorter", 3)):
        assert gateway.handle(Open(spec(name, num_blocks)), 0.0) == []
    assert gateway.handle(report(2, num_free_blocks=2), 1.0, A) == []
    assert started(gateway.handle(report(2, num_free_blocks=4), 1.0, B)) == [("shorter", B, 1)]


def test_a_request_that_no_worker_can_ever_hold_ends_at_once() -> None:
    """A request longer than any worker's model allows is refused as too large; one of just that length waits."""
    gateway = alone({A: report(num_free_blocks=0)})
    most_blocks = MODEL.max_tokens // BLOCK_TOKENS
    effects = gateway.handle(Open(spec("large", most_blocks + 1)), 0.1)
    assert effects == [End("large", FinishReason.ERROR, RefusalReason.TOO_LARGE, 1.0)]
    assert gateway.handle(Open(spec("fits", most_blocks)), 0.1) == []
    assert list(gateway.state.sessions) == ["fits"]


def test_half_an_answer_is_not_cut_off_as_too_large() -> None:
    """A request that has output waits for a larger worker to come back; one without ends when the large one dies."""
    small = Peer("worker-2", 1)
    gateway = alone({A: report()})
    for name in ("answered", "new"):
        assert started(gateway.handle(Open(spec(name, num_blocks=5)), 0.0)) == [(name, A, 1)]
        gateway.handle(Started(name, 1), 0.1, A)
    gateway.handle(Tokens(("answered",), (1,), (0,), (7,)), 0.1, A)
    gateway.handle(PeerUp(small, Role.WORKER, WorkerInfo("k", ModelInfo("m", 100, 16))), 0.1)
    gateway.handle(report(), 0.1, small)
    assert gateway.handle(PeerDown(A), 0.2) == [End("new", FinishReason.ERROR, RefusalReason.TOO_LARGE, 1.0)]
    assert list(gateway.state.sessions) == ["answered"]
    back = Peer("worker-0", 2)
    gateway.handle(PeerUp(back, Role.WORKER, WorkerInfo("k", MODEL)), 0.3)
    assert started(gateway.handle(report(), 0.4, back)) == [("answered", back, 2)]


def test_a_placement_that_no_report_confirms_stops_counting() -> None:
    """A lost placement does not hold its room for ever: after a while a waiting request gets it."""
    gateway = alone({A: report(num_free_blocks=1)})
    assert started(gateway.handle(Open(spec("lost")), 0.0)) == [("lost", A, 1)]
    assert gateway.handle(Open(spec("next")), 0.1) == []
    assert started(gateway.handle(Tick(), 4.0)) == [("lost", A, 1)]
    assert ("next", A, 1) in started(gateway.handle(Tick(), 5.0))


def test_draining_workers_get_nothing() -> None:
    """A worker that drains gets no requests, and neither does one that has not reported."""
    gateway = alone({A: report(draining=True), B: report(num_free_blocks=1)})
    gateway.handle(PeerUp(Peer("worker-2", 1), Role.WORKER, WorkerInfo("k", MODEL)), 0.0)
    assert started(gateway.handle(Open(spec("r")), 0.0)) == [("r", B, 1)]
    assert gateway.handle(Open(spec("s")), 0.0) == []
    assert started(gateway.handle(report(2), 0.1, Peer("worker-2", 1))) == [("s", Peer("worker-2", 1), 1)]


def test_cordoned_workers_get_nothing() -> None:
    """A worker's report tells of the cordon, so it holds while the coordinator that ordered it is gone."""
    gateway = alone({A: report(cordon=Cordon.CORDONED), B: report(num_free_blocks=1)})
    assert started(gateway.handle(Open(spec("r")), 0.0)) == [("r", B, 1)]
    assert gateway.handle(Open(spec("s")), 0.0) == []


def test_a_refused_request_goes_elsewhere_under_a_new_epoch() -> None:
    """A request that a full worker refuses is released there, and started on another worker."""
    gateway = alone({A: report(num_free_blocks=5), B: report(num_free_blocks=3)})
    assert started(gateway.handle(Open(spec("r")), 0.0)) == [("r", A, 1)]
    effects = gateway.handle(Refused("r", 1, RefusalReason.OVERLOADED, 1.0), 0.1, A)
    assert effects[0] == Send(A, Release("r", 1))
    assert started(effects) == [("r", B, 2)]


def test_a_refused_request_takes_no_room() -> None:
    """A request that was refused and fits nowhere else holds no room on the worker that refused it."""
    gateway = alone({A: report(num_free_blocks=1)})
    assert started(gateway.handle(Open(spec("r")), 0.0)) == [("r", A, 1)]
    assert gateway.handle(Refused("r", 1, RefusalReason.OVERLOADED, 1.0), 0.1, A) == [Send(A, Release("r", 1))]
    assert started(gateway.handle(Open(spec("s")), 0.2)) == [("s", A, 1)]


def test_a_dead_workers_requests_go_on_elsewhere() -> None:
    """With the coordinator gone a worker's death costs no request."""
    gateway = alone({A: report(num_free_blocks=5), B: report(num_free_blocks=3)})
    assert started(gateway.handle(Open(spec("r")), 0.0)) == [("r", A, 1)]
    gateway.handle(Started("r", 1), 0.1, A)
    assert started(gateway.handle(PeerDown(A), 0.2)) == [("r", B, 2)]
    assert started(gateway.handle(Open(spec("s")), 0.3)) == [("s", B, 1)]


def test_patience_ends_though_reports_come() -> None:
    """Reports of room on a worker that a request avoids do not prolong its patience; it ends as overload."""
    gateway = alone({A: report()})
    assert started(gateway.handle(Open(spec("r")), 0.0)) == [("r", A, 1)]
    assert gateway.handle(Refused("r", 1, RefusalReason.DRAINING, 1.0), 0.0, A) == [Send(A, Release("r", 1))]
    ended: list[Effect] = []
    for i in range(200):
        now = i * 0.2
        ended += gateway.handle(report(2 + i), now, A)
        deadline = gateway.state.next_deadline()
        if deadline is not None and deadline <= now:
            ended += gateway.handle(Tick(), now)
    assert len(ended) == 1
    assert isinstance(ended[0], End)
    assert (ended[0].reason, ended[0].refusal) == (FinishReason.ERROR, RefusalReason.OVERLOADED)


def test_a_new_coordinator_places_only_requests_without_a_worker() -> None:
    """The next coordinator places waiting and new requests. Requests that the fallback placed stay where they are,
    whatever the coordinator answers.
    """
    gateway = alone({A: report(num_free_blocks=1)})
    assert started(gateway.handle(Open(spec("placed")), 0.0)) == [("placed", A, 1)]
    assert gateway.handle(Open(spec("waits")), 0.1) == []
    back = Peer("coordinator", 2)
    assert gateway.handle(PeerUp(back, Role.COORDINATOR), 0.2) == [Send(back, Place("waits", 1, BLOCK_TOKENS))]
    assert gateway.handle(report(2), 0.3, A) == []
    assert gateway.handle(Placed("placed", 1, B), 0.4, back) == [Send(back, Unplace("placed", 1))]
    assert gateway.state.sessions["placed"].instance == A
    assert gateway.handle(Open(spec("new")), 0.5) == [Send(back, Place("new", 1, BLOCK_TOKENS))]
    assert started(gateway.handle(Placed("waits", 1, A), 0.6, back)) == [("waits", A, 1)]


def test_the_coordinator_goes_again() -> None:
    """Each time that the coordinator goes, gateways begin with the latest reports and no placements in flight."""
    gateway = alone({A: report(num_free_blocks=1)})
    gateway.handle(Open(spec("first")), 0.0)
    back = Peer("coordinator", 2)
    gateway.handle(PeerUp(back, Role.COORDINATOR), 0.1)
    gateway.handle(report(2, num_free_blocks=1, accepted=("first",)), 0.2, A)
    gateway.handle(PeerDown(back), 0.3)
    assert started(gateway.handle(Open(spec("second")), 0.4)) == [("second", A, 1)]


def test_a_coordinator_that_was_never_met_is_given_retry_s() -> None:
    """At a cluster's start requests wait ``retry_s`` for the coordinator, and then are placed without it."""
    gateway = knowing({A: report()}, met_coordinator=False)
    assert gateway.handle(Open(spec("r")), 0.5) == []
    assert gateway.handle(report(2), 1.0, A) == []
    assert gateway.state.next_deadline() == 1.5
    assert started(gateway.handle(Tick(), 1.5)) == [("r", A, 1)]
    assert started(gateway.handle(Open(spec("s")), 1.6)) == [("s", A, 1)]


def test_a_client_that_leaves_before_there_is_room() -> None:
    """A request whose client has left is not started by a later report."""
    gateway = alone({A: report(num_free_blocks=0)})
    assert gateway.handle(Open(spec("r")), 0.0) == []
    assert gateway.handle(Close("r"), 0.1) == []
    assert gateway.handle(report(2), 0.2, A) == []


# --- the whole cluster ---------------------------------------------------------------------------------------------


def lose_coordinator(world: World) -> None:
    """The coordinator dies, and all processes notice."""
    world.kill(COORDINATOR_NAME)
    for survivor, dead in list(world.pending_deaths):
        world.tell_death(survivor, dead)


def report_loads(world: World) -> None:
    for _ in range(3):
        world.advance(RETRY_S / 2)
        world.progress()


def owners(world: World) -> Counter[str]:
    """The number of requests on each worker."""
    return Counter(
        {
            name: len(process.core.requests)
            for name, process in world.processes.items()
            if isinstance(process.core, InstanceState)
        }
    )


def test_a_cluster_serves_without_its_coordinator() -> None:
    """Requests that come while the coordinator is gone are spread, and each is served completely and once."""
    world = World(num_workers=3, num_gateways=2)
    report_loads(world)
    lose_coordinator(world)
    for i in range(6):
        world.open(f"r{i}", (1, 2, i), 8, gateway="gateway-0")
    world.progress()
    assert set(owners(world)) == {"worker-0", "worker-1", "worker-2"}
    for i in range(6, 12):
        world.open(f"r{i}", (1, 2, i), 8, gateway="gateway-1")
    for _ in range(500):
        world.progress()
        world.advance(RETRY_S / 2)
    assert COORDINATOR_NAME not in world.processes
    assert all(client.tokens == client.expected and client.end for client in world.clients.values())
    world.settle()
    world.check_at_rest()


def test_draining_workers_are_avoided() -> None:
    """A worker that drains while the coordinator is gone gets no new requests, and finishes those that it has."""
    world = World(num_workers=2)
    report_loads(world)
    lose_coordinator(world)
    world.open("before", (1, 2, 3), 24)
    world.progress()
    (busy,) = [name for name, count in owners(world).items() if count]
    (other,) = {"worker-0", "worker-1"} - {busy}
    world.drain(busy)
    report_loads(world)
    for i in range(3):
        world.open(f"after{i}", (1, 2, i), 24)
    world.progress()
    assert owners(world)[other] == 3
    world.settle()
    world.check_at_rest()


PROMPTS = st.lists(st.lists(st.integers(0, 49), min_size=1, max_size=12).map(tuple), min_size=1, max_size=6)


@settings(deadline=None)
@given(
    bursts=st.lists(
        st.tuples(
            PROMPTS,
            st.integers(1, 20),
            st.sampled_from(["kill", "tell", "start", "worker", "nothing"]),
            st.integers(0, 4),
            st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        ),
        min_size=2,
        max_size=8,
    )
)
def test_coordinators_come_and_go(bursts: list[tuple[list[tuple[int, ...]], int, str, int, float]]) -> None:
    """However often the coordinator goes and comes, and whenever that is noticed, each request is served once."""
    world = World(num_workers=2, num_gateways=2)
    number = 0
    for prompts, max_tokens, what, rounds, seconds in bursts:
        for prompt in prompts:
            number += 1
            world.open(f"r{number}", prompt, max_tokens, gateway=f"gateway-{number % 2}")
        if what == "kill" and COORDINATOR_NAME in world.processes:
            world.kill(COORDINATOR_NAME)
        elif what == "start" and COORDINATOR_NAME not in world.processes:
            world.start(COORDINATOR_NAME)
        elif what == "worker":
            world.kill("worker-1")
            world.start("worker-1")
        elif what == "tell":
            for survivor, dead in list(world.pending_deaths):
                world.tell_death(survivor, dead)
        for _ in range(rounds):
            world.progress()
            world.advance(seconds)
    world.settle()
    assert all(
        client.end is not None and client.end.reason in (FinishReason.STOP, FinishReason.LENGTH)
        for client in world.clients.values()
    )
    world.check_at_rest()
