"""The ring of checkpoints: each instance has one holder, no holder has two, and it changes little with the fleet."""

from dataclasses import replace

from actorserve.core.checkpoints.ring import CheckpointRing
from actorserve.core.effects import Send
from actorserve.core.messages import CheckpointTo, LoadReport, ModelInfo, Peer
from actorserve.core.placement.fleet import Fleet
from actorserve.core.placement.instance_view import InstanceView, NewInstance

REPORT = LoadReport(1, 0, 0, 800, 0, 0, 100, 4, 0, host_total_bytes=800)


def views(*names: str, kind: str = "kind") -> list[InstanceView]:
    return [InstanceView(Peer(name, 1), kind, ModelInfo("m", 10, 100), REPORT) for name in names]


def holders(sends: list[Send]) -> dict[str, str]:
    """The holder that each instance is told."""
    told = {}
    for send in sends:
        assert isinstance(send.message, CheckpointTo)
        told[send.to.name] = send.message.holder.name
    return told


def test_each_instance_has_the_next_of_its_kind_as_holder() -> None:
    """Within a kind the holders make one ring; another kind has a ring of its own."""
    sends = CheckpointRing().round([*views("c", "a", "b"), *views("y", "x", kind="other")], 0.0)
    assert holders(sends) == {"a": "b", "b": "c", "c": "a", "x": "y", "y": "x"}


def test_an_instance_that_goes_changes_the_holder_of_one() -> None:
    """Only the instance whose holder is gone gets a new one at once; the others are told again after a while."""
    ring = CheckpointRing()
    ring.round(views("a", "b", "c"), 0.0)
    assert ring.round(views("a", "b", "c"), 1.0) == []
    assert holders(ring.round(views("a", "c"), 2.0)) == {"a": "c"}
    assert holders(ring.round(views("a", "c"), 10.0)) == {"c": "a"}


def test_a_new_incarnation_is_told_and_named() -> None:
    """An instance that was started again is a new holder, and is told its own."""
    ring = CheckpointRing()
    ring.round(views("a", "b"), 0.0)
    again = [*views("a"), InstanceView(Peer("b", 2), "kind", ModelInfo("m", 10, 100), REPORT)]
    assert ring.round(again, 1.0) == [
        Send(Peer("a", 1), CheckpointTo(Peer("b", 2))),
        Send(Peer("b", 2), CheckpointTo(Peer("a", 1))),
    ]


def test_an_instance_that_cannot_hold_checkpoints_is_not_in_the_ring() -> None:
    """An instance without a host pool, without a report, or terminating holds none; a single instance has no holder."""
    bare, leaving, alone = views("a", "c", "d")
    bare.report = replace(REPORT, host_total_bytes=0)
    leaving.report = replace(REPORT, draining=True)
    fleet = Fleet(64, 5.0)
    for view in (bare, leaving, alone):
        fleet.add(NewInstance(view.peer, view.kind, view.model))
        fleet.on_report(view.peer, view.report, 0.0)
    fleet.add(NewInstance(Peer("b", 1), "kind", ModelInfo("m", 10, 100)))
    assert CheckpointRing().round(fleet.views.values(), 0.0) == []
