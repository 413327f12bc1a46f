"""A gateway knows the workers' loads by the coordinator's digests, and by workers' own reports without it."""

from actorserve.core.messages import (
    LoadDigest,
    Open,
    Peer,
    PeerDown,
    PeerUp,
    Role,
    Tick,
    WorkerInfo,
)
from tests.core.harness.fallback import alone, knowing, report, spec, started
from tests.core.harness.gateway import COORDINATOR, MODEL, A, B


def test_workers_report_to_a_gateway_while_it_has_no_coordinator() -> None:
    """When the coordinator goes, all workers are asked for reports, and new ones as they come. Those that are not heard
    of are asked again while requests wait. When a coordinator is back, none is wanted any more.
    """
    gateway = knowing({A: report()}, report_ttl_s=2.0)
    assert gateway.wanted == []
    gateway.handle(PeerDown(COORDINATOR), 0.0)
    gateway.handle(PeerUp(B, Role.WORKER, WorkerInfo("k", MODEL)), 0.0)
    assert gateway.wanted == [(A, True), (B, True)]
    gateway.handle(Open(spec("r", num_blocks=11)), 0.5)
    gateway.handle(Tick(), 1.5)
    assert gateway.wanted[2:] == [(B, True)]
    gateway.handle(report(1), 1.6, B)
    gateway.handle(Tick(), 2.5)
    assert gateway.wanted[3:] == [(A, True)]
    gateway.handle(PeerUp(Peer("coordinator", 2), Role.COORDINATOR), 3.0)
    assert gateway.wanted[4:] == [(A, False), (B, False)]
    gateway.handle(report(2), 3.1, B)
    assert gateway.wanted[6:] == [(B, False)]


def test_digests_replace_what_is_known() -> None:
    """A digest tells the loads of all workers: older reports give way, newer ones of workers stay, and a worker that it
    does not name has none. A digest of a coordinator that is not up changes nothing.
    """
    gateway = knowing({A: report(5), B: report(5)})
    loads = gateway.state.peers.loads
    gateway.handle(LoadDigest((A,), (report(9),)), 0.0, Peer("coordinator", 0))
    assert gateway.state.counts.num_stale_messages == 1
    assert loads == gateway.state.peers.loads == {A: report(5), B: report(5)}
    gateway.handle(report(7), 0.0, A)
    gateway.handle(LoadDigest((A, B, Peer("unknown", 1)), (report(6), report(6), report(6))), 0.1, COORDINATOR)
    assert gateway.state.peers.loads == {A: report(7), B: report(6)}
    gateway.handle(LoadDigest((A,), (report(8),)), 0.2, COORDINATOR)
    assert gateway.state.peers.loads == {A: report(8)}


def test_an_old_digest_does_not_replace_a_workers_own_report() -> None:
    """While the coordinator is gone, a report of its time that arrives late does not hide what a worker said since."""
    gateway = alone({A: report(1, num_free_blocks=1)})
    gateway.handle(report(3, num_free_blocks=0), 0.1, A)
    gateway.handle(LoadDigest((A,), (report(2, num_free_blocks=9),)), 0.2, COORDINATOR)
    assert started(gateway.handle(Open(spec("r")), 0.3)) == []
