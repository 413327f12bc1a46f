"""Workers that meet on demand: they link, watch each other, part, and never fence each other."""

import pytest

from actorserve.core.messages import PROTOCOL_VERSION, Fenced, Hello, Members, Peer, PeerDown, PeerUp, Role
from actorserve.wire.memory_transport import MemoryTransport
from tests.actors.cluster import TIMES, Cluster, address_of, info_of

C, G, W, W1 = "coordinator", "gateway-0", "worker-0", "worker-1"
NAMES = (C, G, W, W1)


def _started() -> Cluster:
    cluster = Cluster()
    for name in NAMES:
        cluster.start(name, 1)
    cluster.settle()
    return cluster


def _met() -> Cluster:
    cluster = _started()
    cluster.meet(W, W1)
    cluster.settle()
    assert cluster.are_up(W, W1)
    return cluster


def _ups_and_downs(cluster: Cluster, of: str, at: str) -> list[type[PeerUp] | type[PeerDown]]:
    return [
        type(message)
        for _, _, message in cluster.processes[at].core.log
        if isinstance(message, PeerUp | PeerDown) and message.peer.name == of
    ]


def test_two_workers_meet_at_once() -> None:
    """One Meet makes both workers up at each other, with all data of their Hellos. No other link changes."""
    cluster = _met()
    up = PeerUp(Peer(W1, 1), Role.WORKER, info_of(W1))
    assert up in [message for _, _, message in cluster.processes[W].core.log]
    assert _ups_and_downs(cluster, W, at=W1) == [PeerUp]
    cluster.advance(60.0)
    assert cluster.are_up(W, W1)
    assert cluster.problems() == []
    assert all(process.core.downs == 0 for process in cluster.processes.values())


@pytest.mark.parametrize("others", [(W, W1), (W1, W)])
def test_meeting_again_does_nothing(others: tuple[str, str]) -> None:
    """A Meet for a worker that is already up sends no message, from either side."""
    cluster = _met()
    sent = {name: process.transport.counts["sent"] for name, process in cluster.processes.items()}
    cluster.meet(*others)
    cluster.settle()
    assert sent == {name: process.transport.counts["sent"] for name, process in cluster.processes.items()}


def test_two_workers_that_ask_at_once_meet_once() -> None:
    """If both ask at the same moment, both get one PeerUp."""
    cluster = _started()
    cluster.meet(W, W1)
    cluster.meet(W1, W)
    cluster.advance(5.0)
    assert cluster.are_up(W, W1)
    assert _ups_and_downs(cluster, W, at=W1) == _ups_and_downs(cluster, W1, at=W) == [PeerUp]


def test_asking_again_while_asking_sends_nothing() -> None:
    """A worker that does not answer is asked at the search's interval, however many Meets come."""
    cluster = _started()
    cluster.processes[W1].is_paused = True
    cluster.meet(W, W1)
    cluster.settle()
    sent = cluster.processes[W].transport.counts["sent"]
    for _ in range(10):
        cluster.meet(W, W1)
        cluster.settle()
    assert cluster.processes[W].transport.counts["sent"] == sent
    cluster.processes[W1].is_paused = False
    cluster.advance(1.0)
    assert cluster.are_up(W, W1)


@pytest.mark.parametrize("stranger", [Peer("worker-7", 1), Peer(W1, 2), Peer(G, 2), Peer(W, 1), Peer(C, 1)])
def test_only_workers_that_the_coordinator_names_are_met(stranger: Peer) -> None:
    """A Meet for a peer that is not in Members, or for ourselves, sends no message, and is counted."""
    cluster = _started()
    process = cluster.processes[W]
    sent = process.transport.counts["sent"]
    process.membership.get_to_know(stranger, cluster.now)
    assert process.transport.counts["sent"] == sent
    assert process.membership.counts["meeting an unknown worker"] == 1
    cluster.advance(1.0)
    assert cluster.problems() == []


def test_a_worker_that_does_not_answer_is_given_up() -> None:
    """An unreachable worker is asked for ``death_after_s``; a later Meet asks it again."""
    cluster = _started()
    cluster.hub.cut(address_of(W), address_of(W1))
    cluster.meet(W, W1)
    cluster.advance(3 * TIMES.death_after_s)
    cluster.hub.heal(address_of(W), address_of(W1))
    cluster.advance(3 * TIMES.death_after_s)
    assert not cluster.are_up(W, W1)
    cluster.meet(W, W1)
    cluster.settle()
    assert cluster.are_up(W, W1)


def _is_looked_for(cluster: Cluster, name: str) -> bool:
    """Whether ``worker-0`` keeps a link to any incarnation of this name."""
    hello = Hello(PROTOCOL_VERSION, Role.WORKER, address_of(W))
    return cluster.processes[W].transport.send(Peer(name, 0), hello)


def test_members_do_not_end_the_asking() -> None:
    """A worker that the next Members names unchanged is still asked, and is met once it can be reached."""
    cluster = _started()
    cluster.hub.cut(address_of(W), address_of(W1))
    cluster.meet(W, W1)
    cluster.settle()
    cluster.start("worker-2", 1)  # so all processes get a Members
    cluster.advance(TIMES.death_after_s / 4)
    cluster.hub.heal(address_of(W), address_of(W1))
    cluster.advance(TIMES.death_after_s / 2)
    assert cluster.are_up(W, W1)


def test_a_restart_ends_the_asking() -> None:
    """A worker that Members names with a new incarnation is not asked any more."""
    cluster = _started()
    cluster.hub.cut(address_of(W), address_of(W1))
    cluster.meet(W, W1)
    cluster.settle()
    assert _is_looked_for(cluster, W1)
    cluster.kill(W1)
    cluster.start(W1, 2)
    cluster.settle()
    assert not _is_looked_for(cluster, W1)


def test_a_worker_that_rejoined_meets_no_worker_until_told() -> None:
    """A worker that rejoined meets no other worker until the coordinator has sent it Members again."""
    cluster = _started()
    process = cluster.processes[W]
    assert cluster.processes[G].transport.send(Peer(W, 1), Fenced(1))
    process.actor.step()
    assert process.actor.me == Peer(W, 2)
    process.membership.get_to_know(Peer(W1, 1), cluster.now)
    assert not _is_looked_for(cluster, W1)
    cluster.settle()
    cluster.meet(W, W1)
    cluster.settle()
    assert cluster.are_up(W, W1)
    assert cluster.problems(lossless=False) == []


def test_a_worker_that_members_no_longer_names_is_not_asked() -> None:
    """The search for a worker that dies ends with the next Members, and the link to it is closed."""
    cluster = _started()
    cluster.processes[W1].is_paused = True
    cluster.meet(W, W1)
    cluster.settle()
    cluster.kill(W1)
    process = cluster.processes[W]
    process.membership.handle(
        Members((C, W), (1, 1), (Role.COORDINATOR, Role.WORKER), (address_of(C), address_of(W))),
        cluster.now,
        Peer(C, 1),
    )
    assert not _is_looked_for(cluster, W1)
    cluster.start(W1, 2)
    cluster.advance(10.0)
    assert process.actor.peers == (Peer(C, 1), Peer(G, 1))


@pytest.mark.parametrize("orderly", [True, False])
def test_a_worker_that_ends_goes_down_at_the_other(orderly: bool) -> None:
    """A goodbye works at once, and silence within the limit. Then the link is closed, and no ask goes out any more."""
    cluster = _met()
    process = cluster.processes[W]
    if orderly:
        cluster.leave(W1)
        cluster.settle()
    else:
        cluster.kill(W1)
        cluster.advance(TIMES.death_after_s + 2 * TIMES.heartbeat_s)
    assert _ups_and_downs(cluster, W1, at=W) == [PeerUp, PeerDown]
    for incarnation in (0, 1):
        hello = Hello(PROTOCOL_VERSION, Role.WORKER, address_of(W))
        assert not process.transport.send(Peer(W1, incarnation), hello)
    process.membership.get_to_know(Peer(W1, 1), cluster.now)
    cluster.start(W1, 2)
    cluster.advance(10.0)
    assert not cluster.are_up(W, W1)
    assert cluster.problems() == []


def test_a_worker_that_returns_can_be_met_again() -> None:
    """Once Members has the new incarnation, the old one goes down at the other worker; a Meet links them again."""
    cluster = _met()
    cluster.kill(W1)
    cluster.start(W1, 2)
    cluster.settle()
    cluster.meet(W, W1)
    cluster.settle()
    assert cluster.are_up(W, W1)
    assert _ups_and_downs(cluster, W1, at=W) == [PeerUp, PeerDown, PeerUp]
    assert cluster.problems() == []


def test_workers_that_lost_each_other_stay_apart() -> None:
    """When only their link is cut, both keep their incarnations, and these two incarnations never meet again."""
    cluster = _met()
    cluster.hub.cut(address_of(W), address_of(W1))
    cluster.advance(10.0)
    assert not cluster.are_up(W, W1)
    cluster.hub.heal(address_of(W), address_of(W1))
    cluster.meet(W, W1)
    cluster.meet(W1, W)
    cluster.advance(30.0)
    assert not cluster.are_up(W, W1)
    assert cluster.problems() == []
    for name, process in cluster.processes.items():
        assert process.actor.me == Peer(name, 1)
        assert process.membership.counts["fenced"] == process.membership.counts["rejoined"] == 0
        assert process.core.downs == (1 if name in (W, W1) else 0)


def test_a_new_incarnation_ends_the_separation() -> None:
    """Workers that stay apart may meet again once one of them has restarted."""
    cluster = _met()
    cluster.hub.cut(address_of(W), address_of(W1))
    cluster.advance(10.0)
    cluster.hub.heal(address_of(W), address_of(W1))
    cluster.kill(W1)
    cluster.start(W1, 2)
    cluster.settle()
    cluster.meet(W1, W)
    cluster.settle()
    assert cluster.are_up(W, W1)
    assert cluster.problems() == []


def test_a_hello_of_a_lost_worker_is_counted() -> None:
    """A worker that has not noticed the separation gets no answer and is not fenced."""
    cluster = _met()
    lost = cluster.processes[W].membership
    stranger = MemoryTransport(cluster.hub, Peer("worker-9", 1), address_of("worker-9"), lambda: cluster.now)
    assert stranger.connect(Peer(W, 1), address_of(W))
    assert stranger.send(Peer(W, 1), Hello(PROTOCOL_VERSION, Role.WORKER, address_of("worker-9")))
    cluster.advance(3 * TIMES.death_after_s)
    assert Peer("worker-9", 1) not in lost.peers
    stranger.send(Peer(W, 1), Hello(PROTOCOL_VERSION, Role.WORKER, address_of("worker-9")))
    cluster.advance(1.0)
    assert lost.counts["apart"] == 1
    assert lost.counts["fenced"] == 0
    assert Peer("worker-9", 1) not in lost.peers


def test_links_among_workers_outlive_the_coordinator() -> None:
    """Two workers stay up at each other while the coordinator is gone for a minute, and after it is back."""
    cluster = _met()
    cluster.kill(C)
    cluster.advance(60.0)
    assert cluster.are_up(W, W1)
    cluster.start(C, 2)
    cluster.advance(TIMES.death_after_s)
    assert cluster.are_up(W, W1)
    assert cluster.problems() == []
    assert _ups_and_downs(cluster, W, at=W1) == _ups_and_downs(cluster, W1, at=W) == [PeerUp]


def test_without_the_coordinator_workers_still_meet() -> None:
    """While the coordinator is gone, a worker finds the others by the last Members."""
    cluster = _started()
    cluster.kill(C)
    cluster.advance(10.0)
    cluster.meet(W, W1)
    cluster.settle()
    assert cluster.are_up(W, W1)


def test_a_worker_paused_for_too_long_is_met_as_a_new_incarnation() -> None:
    """Only the coordinator fences it. The old incarnation is down at the other worker, and the new one can be met."""
    cluster = _met()
    paused = cluster.processes[W1]
    paused.is_paused = True
    cluster.advance(30.0)
    assert _ups_and_downs(cluster, W1, at=W) == [PeerUp, PeerDown]
    paused.is_paused = False
    cluster.advance(10.0)
    assert paused.actor.me.incarnation > 1
    assert cluster.processes[W].membership.counts["fenced"] == 0
    assert _ups_and_downs(cluster, W, at=W1) == [PeerUp, PeerDown]
    cluster.meet(W, W1)
    cluster.settle()
    assert cluster.are_up(W, W1)
    assert cluster.problems() == []


def test_a_worker_fenced_by_a_gateway_goes_down_at_the_other_worker() -> None:
    """Once the coordinator names its new incarnation, the link of the old one ends on both sides."""
    cluster = _met()
    cluster.hub.cut(address_of(G), address_of(W1))
    cluster.advance(10.0)
    cluster.hub.heal(address_of(G), address_of(W1))
    cluster.advance(15.0)
    assert cluster.processes[W1].actor.me.incarnation > 1
    assert not cluster.are_up(W, W1)
    assert not _is_looked_for(cluster, W1)
    assert cluster.processes[W].actor.peers == (Peer(C, 1), Peer(G, 1))
    assert cluster.problems() == []
    cluster.meet(W, W1)
    cluster.settle()
    assert cluster.are_up(W, W1)


def test_a_short_cut_takes_no_worker_down() -> None:
    """Two workers stay up if the cut between them is shorter than ``death_after_s``."""
    cluster = _met()
    cluster.hub.cut(address_of(W), address_of(W1))
    cluster.advance(TIMES.death_after_s / 2)
    cluster.hub.heal(address_of(W), address_of(W1))
    cluster.advance(10.0)
    assert cluster.are_up(W, W1)
    assert cluster.problems() == []
