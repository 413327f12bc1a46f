"""Actuators of power caps meet coordinators alone."""

from tests.actors.cluster import Cluster

C, G, W, P = "coordinator", "gateway-0", "worker-0", "power"


def test_an_actuator_meets_the_coordinator_and_no_other_process() -> None:
    """The coordinator meets it, and gateways and workers do not even hear of it, because the last version of the
    protocol cannot read its role.
    """
    cluster = Cluster()
    for name in (C, G, W, P):
        cluster.start(name, 1)
    cluster.advance(10.0)
    assert cluster.are_up(C, P)
    assert cluster.are_up(G, W)
    assert not cluster.are_up(G, P)
    assert not cluster.are_up(W, P)
