"""The coordinator tells gateways the loads of all instances, in one message, at a low rate."""

from dataclasses import replace

from actorserve.core.effects import Effect, Send
from actorserve.core.messages import LoadDigest, Peer, PeerDown, PeerUp, Role, Tick
from tests.core.harness.coordinator import A, B, Coordinator
from tests.core.harness.fleets import GATEWAY

OTHER = Peer("gateway-1", 1)


def digests(effects: list[Effect]) -> list[tuple[Peer, LoadDigest]]:
    """Each digest that was sent, and to which gateway."""
    sends = [effect for effect in effects if isinstance(effect, Send)]
    return [(send.to, send.message) for send in sends if isinstance(send.message, LoadDigest)]


def test_gateways_get_a_digest_at_once_and_then_at_its_rate() -> None:
    """A new gateway hears all instances' last reports at once. Then all gateways get one and the same message every
    ``digest_s`` seconds, and none once they are down.
    """
    coordinator = Coordinator(A, digest_s=1.0)
    coordinator.report(A, 500)
    assert coordinator.state.next_deadline() is None
    [(to, first)] = digests(coordinator.handle(PeerUp(GATEWAY, Role.GATEWAY), 10.0))
    assert (to, first.workers, [report.sequence for report in first.reports]) == (GATEWAY, (A,), [1])
    coordinator.handle(PeerUp(OTHER, Role.GATEWAY), 10.5)
    coordinator.report(A, 400, now=10.6)
    assert coordinator.state.next_deadline() == 11.0
    assert digests(coordinator.handle(Tick(), 10.9)) == []
    (one, digest), (other, same) = digests(coordinator.handle(Tick(), 11.0))
    assert (one, other) == (GATEWAY, OTHER)
    assert digest is same
    assert [report.sequence for report in digest.reports] == [2]
    coordinator.handle(PeerDown(GATEWAY), 11.5)
    assert [to for to, _ in digests(coordinator.handle(Tick(), 12.0))] == [OTHER]
    coordinator.handle(PeerDown(OTHER), 12.5)
    assert coordinator.handle(Tick(), 13.0) == []
    assert coordinator.state.next_deadline() is None


def test_a_digest_has_what_is_known_and_nothing_old() -> None:
    """It leaves out instances that have not reported, or not for too long, and the requests that arrived there."""
    coordinator = Coordinator(A, B, Peer("new", 1), report_ttl_s=5.0)
    coordinator.report(A, 500)
    coordinator.report(B, 500, now=3.0, accepted=("r",))
    [(_, digest)] = digests(coordinator.handle(PeerUp(GATEWAY, Role.GATEWAY), 5.0))
    assert digest.workers == (B,)
    report = coordinator.state.fleet.views[B].report
    assert digest.reports == (replace(report, accepted=()),) != (report,)


def test_one_host_shows_the_loads() -> None:
    """Every digest names the host of the first gateway by name, and another one when that gateway has gone."""
    coordinator = Coordinator(A, digest_s=1.0)
    alpha, beta = Peer("alpha/gateway-0", 1), Peer("beta/gateway-0", 1)
    for gateway in (beta, alpha):
        [(_, digest)] = digests(coordinator.handle(PeerUp(gateway, Role.GATEWAY), 0.0))
    assert digest.shown_on == "alpha"
    coordinator.handle(PeerDown(alpha), 0.5)
    [(_, digest)] = digests(coordinator.handle(Tick(), 1.0))
    assert digest.shown_on == "beta"
    [(_, digest)] = digests(Coordinator(A).handle(PeerUp(GATEWAY, Role.GATEWAY), 0.0))
    assert digest.shown_on == ""
