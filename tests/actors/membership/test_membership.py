"""Membership over the in-memory hub under a virtual clock: whatever happens, living processes find each other."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from actorserve.core.messages import (
    PROTOCOL_VERSION,
    Fenced,
    Heartbeat,
    Hello,
    Members,
    Message,
    Peer,
    PeerDown,
    PeerUp,
    Release,
    Role,
    Unplace,
)
from actorserve.wire.memory_transport import MemoryTransport
from tests.actors.cluster import TIMES, Cluster, Process, address_of, info_of

C, G, W, W1 = "coordinator", "gateway-0", "worker-0", "worker-1"
NAMES = (C, G, W, W1)


def _started(*names: str) -> Cluster:
    cluster = Cluster()
    for name in names:
        cluster.start(name, 1)
    cluster.settle()
    return cluster


@pytest.mark.parametrize("order", list(itertools.permutations(NAMES)))
def test_any_order_of_starts_comes_together_at_once(order: tuple[str, ...]) -> None:
    """Processes that start in any order, seconds apart, have all met within a second of the last start."""
    cluster = Cluster()
    for name in order:
        cluster.start(name, 1)
        cluster.advance(3.0)
    assert cluster.problems() == []
    assert all(process.core.downs == 0 for process in cluster.processes.values())


def test_a_peer_comes_up_before_anything_else_and_is_heard() -> None:
    """A core's first message about a peer is PeerUp, with all data of its Hello. A message sent at once arrives."""
    cluster = _started(C, G, W)
    assert cluster.problems() == []
    log = [
        message
        for _, sender, message in cluster.processes[G].core.log
        if sender == Peer(W, 1) or (isinstance(message, PeerUp) and message.peer.name == W)
    ]
    assert log == [PeerUp(Peer(W, 1), Role.WORKER, info_of(W)), Unplace("greeting", 1)]
    assert all(process.membership.counts["stranger"] == 0 for process in cluster.processes.values())


def test_workers_do_not_link_to_workers_unasked() -> None:
    """Members lists all processes, but workers do not link to workers by themselves."""
    cluster = _started(*NAMES)
    assert cluster.processes[W].actor.peers == (Peer(C, 1), Peer(G, 1))


def test_an_idle_cluster_stays_up() -> None:
    """A minute of nothing but heartbeats takes no peer down."""
    cluster = _started(C, G, W)
    cluster.advance(60.0)
    assert cluster.problems() == []
    assert all(process.core.downs == 0 for process in cluster.processes.values())


@pytest.mark.parametrize("victim", [G, W])
def test_a_killed_peer_is_down_within_the_limit(victim: str) -> None:
    """Silence becomes PeerDown between death_after_s and a heartbeat later, at every linked process."""
    cluster = _started(C, G, W)
    cluster.advance(1.0)
    cluster.kill(victim)
    cluster.advance(TIMES.death_after_s - TIMES.heartbeat_s - 0.01)
    assert all(process.core.downs == 0 for process in cluster.processes.values())
    cluster.advance(2 * TIMES.heartbeat_s + 0.02)
    assert all(process.core.downs == 1 for process in cluster.processes.values())
    assert cluster.problems() == []


@pytest.mark.parametrize("victim", NAMES)
def test_a_restart_is_noticed_before_the_limit(victim: str) -> None:
    """A process that restarts quickly at its address is met again well before its silence would count as death."""
    cluster = _started(*NAMES)
    cluster.advance(1.0)
    cluster.kill(victim)
    cluster.start(victim, 2)
    cluster.advance(1.0)
    assert cluster.problems() == []
    for name, process in cluster.processes.items():
        ups_and_downs = [
            m for _, _, m in process.core.log if isinstance(m, PeerUp | PeerDown) and m.peer.name == victim
        ]
        if Peer(victim, 2) in process.actor.peers:
            assert [type(m) for m in ups_and_downs] == [PeerUp, PeerDown, PeerUp], name


def test_a_goodbye_is_heard_at_once() -> None:
    """A goodbye takes the peer down at once, and it may come back as a new incarnation."""
    cluster = _started(C, G, W)
    cluster.leave(W)
    cluster.settle()
    assert cluster.processes[G].actor.peers == (Peer(C, 1),)
    cluster.start(W, 2)
    cluster.settle()
    assert cluster.problems() == []


def test_running_links_outlive_the_coordinator() -> None:
    """While the coordinator is gone for a minute, gateway and worker stay up at each other."""
    cluster = _started(C, G, W)
    cluster.kill(C)
    cluster.advance(60.0)
    assert cluster.processes[G].actor.peers == (Peer(W, 1),)
    assert cluster.processes[W].actor.peers == (Peer(G, 1),)
    cluster.start(C, 2)
    cluster.advance(TIMES.death_after_s)
    assert cluster.problems() == []


def test_a_short_pause_takes_no_peer_down() -> None:
    """A process that is paused for less than ``death_after_s`` loses no peer, and no peer loses it."""
    cluster = _started(C, G, W)
    cluster.advance(1.0)
    cluster.processes[W].is_paused = True
    cluster.advance(1.5)
    cluster.processes[W].is_paused = False
    cluster.advance(5.0)
    assert cluster.problems() == []
    assert all(process.core.downs == 0 for process in cluster.processes.values())


@pytest.mark.parametrize("victim", NAMES)
def test_a_process_paused_for_too_long_rejoins_as_a_new_incarnation(victim: str) -> None:
    """Its peers take it for dead and tell it so. Its core loses all peers, and it rejoins as a newer incarnation."""
    cluster = _started(*NAMES)
    cluster.advance(1.0)
    process = cluster.processes[victim]
    process.is_paused = True
    cluster.advance(30.0)
    process.is_paused = False
    cluster.advance(10.0)
    assert cluster.problems() == []
    assert process.actor.me.incarnation > 1
    assert process.membership.counts["rejoined"] >= 1
    assert process.core.downs >= 1


def test_a_process_that_counts_as_dead_is_told_at_once() -> None:
    """After a long pause the process answers its peers' last ask, is fenced, and rejoins at the same moment."""
    cluster = _started(C, G, W)
    cluster.advance(1.0)
    process = cluster.processes[W]
    process.is_paused = True
    cluster.advance(30.0)
    process.is_paused = False
    cluster.settle()
    assert process.actor.me.incarnation == 2
    assert cluster.problems() == []


@pytest.mark.parametrize(("one", "other"), [(C, G), (C, W), (G, W)])
def test_two_processes_that_lost_each_other_meet_again(one: str, other: str) -> None:
    """After a network cut longer than ``death_after_s`` both are down at each other. They meet again when it heals."""
    cluster = _started(*NAMES)
    cluster.advance(1.0)
    cluster.hub.cut(address_of(one), address_of(other))
    cluster.advance(10.0)
    assert {peer.name for peer in cluster.processes[one].actor.peers}.isdisjoint({other})
    cluster.hub.heal(address_of(one), address_of(other))
    cluster.advance(15.0)
    assert cluster.problems() == []


def test_a_process_whose_clock_went_back_rejoins() -> None:
    """A process restarted with an older incarnation than its peers remember rejoins with a higher number."""
    cluster = _started(C, G, W)
    cluster.kill(W)
    cluster.start(W, 2)
    cluster.kill(W)
    cluster.advance(5.0)
    cluster.start(W, 100)
    cluster.advance(1.0)
    cluster.kill(W)
    cluster.start(W, 50)
    cluster.advance(3.0)
    assert cluster.problems() == []
    assert cluster.processes[W].actor.me.incarnation > 100


def test_a_lost_members_is_told_again() -> None:
    """A worker that missed a Members during a short cut learns of the new worker from the next one."""
    cluster = _started(C, W)
    cluster.advance(1.0)
    cluster.hub.cut(address_of(C), address_of(W))
    cluster.start(W1, 1)
    cluster.advance(0.1)
    cluster.hub.heal(address_of(C), address_of(W))
    cluster.advance(TIMES.death_after_s + TIMES.heartbeat_s)
    cluster.meet(W, W1)
    cluster.settle()
    assert cluster.are_up(W, W1)
    assert cluster.problems(lossless=False) == []


def _tellings(cluster: Cluster, coordinator: Process, until: float) -> list[tuple[float, int]]:
    """The moments until ``until`` and the numbers of Members that the coordinator sent at them."""
    told, sent = [], coordinator.transport.send

    def send(peer: Peer, message: Message) -> bool:
        told.append((cluster.now, type(message) is Members))
        return sent(peer, message)

    coordinator.transport.send = send  # type: ignore[method-assign]
    cluster.advance(until - cluster.now)
    coordinator.transport.send = sent  # type: ignore[method-assign]
    counts = Counter(at for at, is_members in told if is_members)
    return sorted(counts.items())


def test_the_rate_of_members_is_limited() -> None:
    """Three hundred workers that start at once all learn of each other, and Members are sent at a limited rate."""
    cluster = Cluster()
    coordinator = cluster.start(C, 1)
    names = [f"worker-{number}" for number in range(300)]
    for name in names:
        cluster.start(name, 1)
    changes = _tellings(cluster, coordinator, 1.0)
    assert max(number for _, number in changes) <= 256
    assert sum(number for _, number in changes) < 10 * len(names)
    for name in names:
        cluster.processes[name].membership.get_to_know(Peer(names[0], 1), cluster.now)
        cluster.processes[name].membership.get_to_know(Peer(names[-1], 1), cluster.now)
    strangers = [cluster.processes[name].membership.counts["meeting an unknown worker"] for name in names]
    assert strangers == [1, *[0] * 298, 1]  # no worker meets itself
    repeated = _tellings(cluster, coordinator, 0.9 + TIMES.death_after_s)
    assert sum(number for _, number in repeated) == len(names)


def test_a_flood_takes_no_peer_down() -> None:
    """Heartbeats that wait behind a flood of messages count when they are handled."""
    cluster = _started(C, G, W)
    cluster.advance(1.0)
    coordinator, gateway = cluster.processes[C], cluster.processes[G]
    for tenth in range(60):
        for number in range(3000):
            if tenth < 10:
                gateway.transport.send(Peer(C, 1), Unplace("flood", number))
        cluster.now += 0.1
        for process in (gateway, cluster.processes[W]):
            process.actor.step()
        coordinator.actor.step()  # 256 messages in a tenth of a second
        assert coordinator.core.downs == 0
    cluster.advance(1.0)
    assert cluster.problems() == []
    assert all(process.core.downs == 0 for process in cluster.processes.values())


def _stranger(cluster: Cluster, name: str = "worker-9") -> MemoryTransport:
    stranger = MemoryTransport(cluster.hub, Peer(name, 1), address_of(name), lambda: cluster.now)
    for target in (C, G):
        stranger.connect(Peer(target, 1), address_of(target))
    return stranger


def test_no_other_process_passes_for_the_coordinator() -> None:
    """A process of another name that calls itself coordinator is counted and not met; the real one stays up."""
    cluster = _started(C, G)
    stranger = _stranger(cluster)
    hello = Hello(PROTOCOL_VERSION, Role.COORDINATOR, address_of("worker-9"))
    stranger.send(Peer(G, 1), hello)
    cluster.settle()
    assert cluster.processes[G].membership.counts["hello of a false coordinator"] == 1
    assert cluster.processes[G].membership.peers == (Peer(C, 1),)


def test_a_stranger_is_not_heard() -> None:
    """Messages of a process that never said Hello are counted, dropped and change nothing."""
    cluster = _started(C, G)
    stranger = _stranger(cluster)
    told = len(cluster.processes[G].core.log)
    stranger.send(Peer(G, 1), Release("r", 1))
    stranger.send(Peer(G, 1), Heartbeat())
    cluster.settle()
    assert len(cluster.processes[G].core.log) == told
    assert cluster.processes[G].membership.counts["stranger"] == 2


@pytest.mark.parametrize(
    "hello",
    [
        Hello(PROTOCOL_VERSION + 2, Role.WORKER, address_of("worker-9")),
        Hello(PROTOCOL_VERSION, Role.WORKER, address_of("worker-9"), cluster_id="other"),
        Hello(PROTOCOL_VERSION, Role.GATEWAY, address_of("worker-9")),
        Hello(PROTOCOL_VERSION, Role.WORKER, ""),
        Hello(PROTOCOL_VERSION, Role.WORKER, address_of("worker-9"), answers=77),
    ],
)
def test_an_unfit_hello_is_ignored(hello: Hello) -> None:
    """A Hello of a far version, of another cluster, of an unlinked role, without an address, or to another incarnation
    has no effect.
    """
    cluster = _started(C, G)
    stranger = _stranger(cluster)
    stranger.send(Peer(G, 1), hello)
    cluster.advance(1.0)
    assert cluster.problems() == []
    assert cluster.processes[G].core.downs == 0


def test_a_fence_that_makes_no_sense_is_ignored() -> None:
    """A Fenced with an incarnation below ours, or the highest one, changes nothing."""
    cluster = _started(C, G)
    stranger = _stranger(cluster)
    for incarnation in (2**63 - 1, 0):
        assert stranger.send(Peer(G, 1), Fenced(incarnation))
    cluster.advance(1.0)
    assert cluster.processes[G].actor.me == Peer(G, 1)
    assert cluster.problems() == []


_ACTIONS = st.one_of(
    st.tuples(
        st.sampled_from(["start", "start with an older clock", "kill", "leave", "pause", "resume"]),
        st.sampled_from(NAMES),
    ),
    st.tuples(st.sampled_from(["cut", "heal"]), st.sampled_from(list(itertools.combinations(NAMES, 2)))),
    st.tuples(st.just("meet"), st.sampled_from([(W, W1), (W1, W)])),
    st.tuples(st.just("wait"), st.floats(0.0, 1.0) | st.floats(2.0, 6.0)),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(_ACTIONS, max_size=25))
def test_whatever_happens_living_processes_find_each_other(actions: list[tuple[str, object]]) -> None:
    """After any starts, kills, leaves, pauses, cuts and clock jumps, all linked pairs come up once it is quiet."""
    cluster = Cluster()
    later, earlier = itertools.count(10**6, 1000), itertools.count(10**6 - 500, -1000)
    for action, what in actions:
        match action, what:
            case "start", str(name) if name not in cluster.processes:
                cluster.start(name, next(later))
            case "start with an older clock", str(name) if name not in cluster.processes:
                cluster.start(name, next(earlier))
            case _:
                cluster.disturb(action, what)
    cluster.calm_down(NAMES, later)
    lossless = all(action != "cut" for action, _ in actions)
    assert cluster.problems(lossless=lossless) == []
    before = {name: process.core.downs for name, process in cluster.processes.items()}
    cluster.advance(5.0)
    assert cluster.problems(lossless=lossless) == []
    assert before == {name: process.core.downs for name, process in cluster.processes.items()}
