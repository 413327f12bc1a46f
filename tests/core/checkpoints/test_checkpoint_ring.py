"""The ring of guardians: everybody has one, nobody has two to guard, and who comes or goes changes little."""

from dataclasses import replace

from actorserve.core.checkpoints.ring import CheckpointRing
from actorserve.core.effects import Send
from actorserve.core.messages import CheckpointTo, LoadReport, ModelInfo, Peer
from actorserve.core.placement.fleet import InstanceView

REPORT = LoadReport(1, 0, 0, 800, 0, 0, 100, 4, 0, host_total_bytes=800)


def views(*names: str, kind: str = "kind") -> list[InstanceView]:
    return [InstanceView(Peer(name, 1), kind, ModelInfo("m", 10, 100), REPORT) for name in names]


def guards(orders: list[Send]) -> dict[str, str]:
    """Who is guarded by whom."""
    told = {}
    for order in orders:
        assert isinstance(order.message, CheckpointTo)
        told[order.to.name] = order.message.holder.name
    return told


def test_each_is_guarded_by_the_next_of_its_kind() -> None:
    """Within a kind the guardians make one ring; another kind has a ring of its own."""
    orders = CheckpointRing().round([*views("c", "a", "b"), *views("y", "x", kind="other")], 0.0)
    assert guards(orders) == {"a": "b", "b": "c", "c": "a", "x": "y", "y": "x"}


def test_who_goes_changes_the_guardian_of_one() -> None:
    """Only the one that it guarded is told of another, and the rest again only after a while."""
    ring = CheckpointRing()
    ring.round(views("a", "b", "c"), 0.0)
    assert ring.round(views("a", "b", "c"), 1.0) == []
    assert guards(ring.round(views("a", "c"), 2.0)) == {"a": "c"}
    assert guards(ring.round(views("a", "c"), 10.0)) == {"c": "a"}


def test_a_new_incarnation_is_told_and_named() -> None:
    """One that was started again is a new guardian, and hears whom it has."""
    ring = CheckpointRing()
    ring.round(views("a", "b"), 0.0)
    again = [*views("a"), InstanceView(Peer("b", 2), "kind", ModelInfo("m", 10, 100), REPORT)]
    assert ring.round(again, 1.0) == [
        Send(Peer("a", 1), CheckpointTo(Peer("b", 2))),
        Send(Peer("b", 2), CheckpointTo(Peer("a", 1))),
    ]


def test_who_cannot_keep_anything_is_not_in_the_ring() -> None:
    """Without a pool on its host, a report, or a future, an instance guards nobody; and alone nobody guards."""
    bare, new, leaving, alone = views("a", "b", "c", "d")
    bare.report = replace(REPORT, host_total_bytes=0)
    new.report = None
    leaving.report = replace(REPORT, draining=True)
    assert CheckpointRing().round([bare, new, leaving, alone], 0.0) == []
