"""An instance that an operator cordoned or empties: what the coordinator's core sends there, and what it moves away."""

from actorserve.core.cluster.scaling import ScalingConfig
from actorserve.core.messages import Cordon, InstanceRole, Peer
from actorserve.core.pools.config import MAX_PENDING_TOKENS
from tests.core.harness.coordinator import A, B, Coordinator, placements
from tests.core.harness.pairs import Cluster


def cordon(coordinator: Coordinator, peer: Peer, what: Cordon) -> None:
    coordinator.state.operators.orders.cordon(peer.name, what)
    coordinator.state.validate()


def test_a_cordoned_instance_gets_no_placement() -> None:
    """From the order on, before a report shows it, the freest instance gets nothing if it is cordoned."""
    coordinator = Coordinator(A, B)
    coordinator.report(A, 900)
    coordinator.report(B, 500)
    cordon(coordinator, A, Cordon.CORDONED)
    assert placements(coordinator.place("r1", 100)) == [("r1", "worker-1")]
    cordon(coordinator, A, Cordon.OPEN)
    assert placements(coordinator.place("r2", 100)) == [("r2", "worker-0")]


def test_a_token_instance_computes_prompts_while_the_prompt_pool_is_cordoned() -> None:
    """No request waits for a prompt instance that is closed, neither a new one nor one that waits for memory."""
    coordinator = Coordinator(A, B)
    coordinator.report(A, 900, role=InstanceRole.PROMPT)
    coordinator.report(B, 0, role=InstanceRole.TOKEN)
    cordon(coordinator, A, Cordon.CORDONED)
    assert coordinator.place("r1", 100) == []
    assert coordinator.report(B, 900, 0.1, role=InstanceRole.TOKEN) == [("r1", "worker-1")]
    cordon(coordinator, A, Cordon.OPEN)
    coordinator.report(B, 900, 9.0, role=InstanceRole.TOKEN)
    cordon(coordinator, A, Cordon.CORDONED)
    assert placements(coordinator.place("r2", 100, 9.0)) == [("r2", "worker-1")]


def test_a_line_over_the_limit_is_helped_from_its_front() -> None:
    """No prompt instance has room. As soon as a token instance has some, it computes the prompt that waits longest."""
    coordinator = Coordinator(A, B)
    coordinator.report(A, 0, role=InstanceRole.PROMPT)
    coordinator.report(B, 0, role=InstanceRole.TOKEN)
    for number in range(MAX_PENDING_TOKENS // 100 + 1):
        assert coordinator.place(f"r{number}", 100) == []
    assert coordinator.report(B, 150, 0.1, role=InstanceRole.TOKEN) == [("r0", "worker-1")]


def test_a_request_waits_while_all_instances_are_cordoned() -> None:
    """A request that only cordoned instances could hold is not refused, and is placed once one is open again."""
    coordinator = Coordinator(A)
    coordinator.report(A, 900)
    cordon(coordinator, A, Cordon.CORDONED)
    assert coordinator.place("r1", 100) == []
    assert coordinator.report(A, 900, 0.1, cordon=Cordon.CORDONED) == []
    cordon(coordinator, A, Cordon.OPEN)
    assert coordinator.report(A, 900, 0.2, cordon=Cordon.CORDONED) == [("r1", "worker-0")]


def test_a_new_coordinator_learns_a_cordon_from_the_report() -> None:
    """An instance that reports a cordon gets nothing, although this coordinator ordered none."""
    coordinator = Coordinator(A, B)
    coordinator.report(A, 900, cordon=Cordon.CORDONED)
    coordinator.report(B, 500)
    assert placements(coordinator.place("r1", 100)) == [("r1", "worker-1")]


def test_a_reservation_ends_when_its_instance_is_cordoned() -> None:
    """The request that the instance was reserved for may go elsewhere."""
    coordinator = Coordinator(A, promote_after_s=1.0)
    coordinator.report(A, 600)
    coordinator.place("long", 800)
    coordinator.place("new", 100, now=2.0)
    assert coordinator.reserved == {"worker-0": "long"}
    cordon(coordinator, A, Cordon.CORDONED)
    assert coordinator.reserved == {}


def test_an_instance_that_is_emptied_is_a_source_whatever_its_load() -> None:
    """Its whole KV moves to the freest instance, although it is itself nearly free."""
    cluster = Cluster(A, B)
    cluster.report(A, 100, 2)
    cluster.report(B, 100, 1)
    assert cluster.orders() == []
    cluster.state.operators.orders.cordon(A.name, Cordon.EMPTYING)
    assert cluster.orders() == [("worker-0", "worker-1", 100)]


def test_a_cordoned_instance_is_no_destination() -> None:
    """A full instance moves nothing to a cordoned one, and a move to one that is cordoned meanwhile ends."""
    cluster = Cluster(A, B)
    cluster.report(A, 990, 2)
    cluster.report(B, 100, 1)
    cluster.state.operators.orders.cordon(B.name, Cordon.CORDONED)
    assert cluster.orders() == []
    cluster.state.operators.orders.cordon(B.name, Cordon.OPEN)
    ((source, destination, num_bytes),) = cluster.orders()
    assert (source, destination) == ("worker-0", "worker-1")
    assert num_bytes > 0
    cluster.state.operators.orders.cordon(B.name, Cordon.CORDONED)
    assert cluster.orders() == [("worker-0", "worker-1", 0)]


def test_scaling_replaces_the_memory_of_a_cordoned_instance() -> None:
    """The memory of a cordoned instance does not count, so that another one is started, but never one too many."""
    scaling = ScalingConfig(max_workers=3, scale_out_below=200.0, scale_in_above=5000.0, hold_s=0.0)
    cluster = Cluster(A, B, migration=None, scaling=scaling)
    cluster.report(A, 100, 1)
    cluster.report(B, 900, 3)
    assert cluster.state.scaling is not None
    cluster.orders()
    assert cluster.state.scaling.num_starting == 0
    cluster.state.operators.orders.cordon(A.name, Cordon.CORDONED)
    for _ in range(8):
        cluster.orders()
    assert cluster.state.scaling.num_starting == 1
