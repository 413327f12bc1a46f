"""Processes that do not fit together refuse each other, and both sides can tell why."""

import logging

import pytest

from actorserve.actors.membership.refusals import Refusals
from actorserve.core.messages import PROTOCOL_VERSION, Hello, Peer, Role
from tests.actors.cluster import TIMES, Cluster, address_of

C, G, W, W1 = "coordinator", "gateway-0", "worker-0", "worker-1"
MODEL_A = {"model_digest": "aaaa", "tokenizer_digest": "tttt"}
MODEL_B = {"model_digest": "bbbb", "tokenizer_digest": "tttt"}


def _why(cluster: Cluster, one: str, other: str) -> str:
    """Why ``one`` refuses ``other``; empty if it does not."""
    refused = cluster.processes[one].membership.refusals.peers
    return next((peer.why for peer in refused if peer.name == other), "")


def _are_strangers(cluster: Cluster, one: str, other: str) -> bool:
    return not cluster.are_up(one, other) and bool(_why(cluster, one, other)) and bool(_why(cluster, other, one))


def test_a_worker_of_another_model_is_refused() -> None:
    """The coordinator takes over the first worker's model; a worker of another one is refused, and both know why."""
    cluster = Cluster()
    for name, values in ((C, {}), (G, {"tokenizer_digest": "tttt"}), (W, MODEL_A)):
        cluster.start(name, 1, **values)
        cluster.settle()
    cluster.start(W1, 1, **MODEL_B)
    cluster.advance(30.0)
    assert cluster.are_up(C, W)
    assert cluster.are_up(G, W)
    assert _are_strangers(cluster, C, W1)
    assert _why(cluster, C, W1) == "its model has the digest 'bbbb', and this process's has 'aaaa'"
    assert _why(cluster, W1, C) == "its model has the digest 'aaaa', and this process's has 'bbbb'"


def test_a_gateway_with_another_tokenizer_is_refused() -> None:
    """A gateway that cannot spell the workers' tokens never meets them."""
    cluster = Cluster()
    for name, values in ((C, {}), (W, MODEL_A), (G, {"tokenizer_digest": "uuuu"})):
        cluster.start(name, 1, **values)
        cluster.settle()
    cluster.advance(5.0)
    assert _are_strangers(cluster, C, G)
    assert "tokenizer" in _why(cluster, G, C)


def test_a_restarted_coordinator_learns_the_model_again() -> None:
    """A gateway tells a new coordinator which model its requests run on, so that a stray worker cannot come first."""
    cluster = Cluster()
    for name, values in ((C, {}), (G, {}), (W, MODEL_A)):
        cluster.start(name, 1, **values)
        cluster.settle()
    cluster.kill(C)
    cluster.kill(W)
    cluster.advance(5.0)
    cluster.start(C, 2)
    cluster.advance(3.0)
    cluster.start(W1, 1, **MODEL_B)
    cluster.advance(3.0)
    assert _are_strangers(cluster, C, W1)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"cluster_id": "lab"}, "its cluster's id is 'lab', and this process's is ''"),
        (
            {"protocol_version": PROTOCOL_VERSION + 2},
            f"it speaks protocol {PROTOCOL_VERSION + 2}, and this process speaks {PROTOCOL_VERSION}",
        ),
        ({"protocol_version": 14}, f"it speaks protocol 14, and this process speaks {PROTOCOL_VERSION}"),
    ],
)
def test_another_cluster_or_protocol_is_refused(values: dict[str, object], problem: str) -> None:
    """A process of another cluster, or of a protocol that is too far away, is refused with both values."""
    cluster = Cluster()
    cluster.start(C, 1)
    cluster.start(W, 1, **values)
    cluster.advance(5.0)
    assert cluster.processes[C].core.up == set()
    assert _why(cluster, C, W) == problem


def test_the_next_protocol_is_accepted() -> None:
    """A process of the next version works with this one."""
    cluster = Cluster()
    cluster.start(C, 1)
    cluster.start(W, 1, protocol_version=PROTOCOL_VERSION + 1)
    cluster.advance(1.0)
    assert cluster.problems() == []


def test_a_refusal_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Of a minute of attempts each side logs one line, and the number and the time of the last are known."""
    cluster = Cluster()
    cluster.start(C, 1)
    with caplog.at_level(logging.WARNING, "actorserve.membership"):
        cluster.start(W, 1, cluster_id="lab")
        cluster.advance(60.0)
    assert sorted(record.getMessage() for record in caplog.records) == [
        "coordinator refuses worker-0: its cluster's id is 'lab', and this process's is ''",
        "worker-0 refuses coordinator: its cluster's id is '', and this process's is 'lab'",
    ]
    (refused,) = cluster.processes[C].membership.refusals.peers
    assert refused.times == cluster.processes[C].membership.refusals.total > 20
    assert 60.0 - TIMES.death_after_s <= refused.last_at <= 60.0


def test_a_repaired_process_is_not_refused_any_more() -> None:
    """A process that comes back with the right values is met, and no longer listed."""
    cluster = Cluster()
    cluster.start(C, 1)
    cluster.start(W, 1, cluster_id="lab")
    cluster.advance(3.0)
    cluster.kill(W)
    cluster.start(W, 2)
    cluster.advance(1.0)
    assert cluster.problems() == []
    assert cluster.processes[C].membership.refusals.peers == ()
    assert cluster.processes[C].membership.refusals.total > 0


class _CountingLinks:
    """Links that accept everything, and count what is sent and what stays open."""

    def __init__(self) -> None:
        self.me = Peer(C, 1)
        self.num_sent = 0
        self.open: set[Peer] = set()

    def reincarnate(self, incarnation: int) -> None:
        """Not needed here."""

    def connect(self, peer: Peer, address: str, *, takes_bundles: bool = False) -> bool:
        self.open.add(peer)
        return True

    def disconnect(self, peer: Peer) -> None:
        self.open.discard(peer)

    def send(self, peer: Peer, message: object) -> bool:
        self.num_sent += 1
        return True


def test_a_flood_of_refusals_stays_small(caplog: pytest.LogCaptureFixture) -> None:
    """A process that asks all the time gets few answers, and thousands of names take bounded memory, few lines, few
    answers and no link.
    """
    links = _CountingLinks()
    refusals = Refusals(links, TIMES.heartbeat_s)
    hello = Hello(PROTOCOL_VERSION, Role.COORDINATOR, address_of(C))
    for number in range(1000):
        refusals.refuse(Peer(W, 1), "why", hello, address_of(W), number * 0.001)
    assert links.num_sent <= 1.0 / TIMES.heartbeat_s + 1
    links.num_sent = 0
    for number in range(5000):
        refusals.refuse(Peer(f"worker-{number}", 1), "why", hello, address_of(W), 2.0)
    assert links.num_sent <= 64
    assert len(caplog.records) <= 20
    assert len(refusals.peers) <= 256
    assert links.open == set()
    assert refusals.total == 6000
