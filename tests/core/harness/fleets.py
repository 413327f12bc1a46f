"""Fleets of instances that report what the test says."""

from collections.abc import Sequence

from actorserve.core.messages import LoadReport, ModelInfo, Peer, Place
from actorserve.core.placement.fleet import Fleet
from actorserve.core.placement.instance_view import InstanceView, NewInstance
from actorserve.core.placement.rules import DISPATCH_RULES

GATEWAY = Peer("gateway-0", 1)
MODEL = ModelInfo("m", 100, 1000)


def report(sequence: int = 0, used: int = 0, running: int = 0, waiting: int = 0, **fields: object) -> LoadReport:
    """The report of an instance with 1000 bytes, in blocks of 10 bytes and 4 tokens."""
    return LoadReport(sequence, running, waiting, 1000, used, used, 10, 4, 0, **fields)  # type: ignore[arg-type]


def view(name: str, kind: str = "k", **fields: int) -> InstanceView:
    return InstanceView(Peer(name, 1), kind, MODEL, report(**fields))


def fleet_of(
    instances: Sequence[InstanceView | NewInstance],
    dispatch: str = "freeness",
    max_queue: int | None = 64,
    *,
    prefix_aware: bool = True,
) -> Fleet:
    """A fleet of equal instances; those given as views have reported."""
    rule = DISPATCH_RULES[dispatch]
    fleet = Fleet(max_queue, placement_ttl_s=5.0, report_ttl_s=1.0, rule=rule, prefix_aware=prefix_aware)
    for instance in instances:
        fleet.add(NewInstance(instance.peer, instance.kind, instance.model))
        if isinstance(instance, InstanceView):
            fleet.on_report(instance.peer, instance.report, 0.0)
    fleet.validate()
    return fleet


def choose(fleet: Fleet, place: Place) -> str | None:
    """The name of the instance that the fleet chooses."""
    chosen = fleet.choose(place)
    return None if chosen is None else chosen.peer.name


def choose_of(instances: Sequence[InstanceView | NewInstance], place: Place) -> str | None:
    """The name of the instance that a fleet of these chooses."""
    return choose(fleet_of(instances), place)
