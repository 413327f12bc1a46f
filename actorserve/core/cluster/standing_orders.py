"""What operators ordered of workers by name, and that the workers do not report yet.

A cordon belongs to a worker's name: its successor under that name is cordoned, too, until the operator takes it back.
A new coordinator learns cordons from the workers' reports, and those of workers that are down from the other processes
(``lasting_orders``). A role belongs to the worker that is up, because its successor begins with the role that is
configured. A role that an operator ordered stays, while others may follow the load (``core.pools.sizing``). Orders are
told again with each report that does not show them.
"""

from collections.abc import Set

from actorserve.core.effects import Effect, Send
from actorserve.core.messages import Cordon, Drain, InstanceRole, Peer, SetCordon, SetRole
from actorserve.core.placement.fleet import Fleet
from actorserve.core.placement.instance_view import InstanceView, NewInstance


class StandingOrders:
    """The orders of this cluster's operators that concern workers."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._cordons: dict[str, Cordon] = {}  # by name; OPEN if an operator took it back
        self._known: set[Peer] = set()  # the workers whose first report has come
        self._roles: dict[Peer, InstanceRole] = {}  # what operators ordered of workers that are up, or may come up

    @property
    def with_roles(self) -> Set[Peer]:
        """The workers that an operator gave a role."""
        return self._roles.keys()

    @property
    def cordons(self) -> dict[str, Cordon]:
        """The cordoned workers by name, whether they are up or not."""
        return {name: cordon for name, cordon in self._cordons.items() if cordon is not Cordon.OPEN}

    def cordon(self, name: str, cordon: Cordon) -> list[Effect]:
        """Order this of the worker called ``name``, which may be down."""
        self._cordons[name] = cordon
        return [
            effect
            for view in self._fleet.views.values()
            if view.peer.name == name
            for effect in self._order(view, cordon)
        ]

    def role(self, view: InstanceView, role: InstanceRole) -> list[Effect]:
        """Have the worker compute these phases from now on, as an operator says."""
        self._roles[view.peer] = role
        return self.assign(view, role)

    def keep_role(self, peer: Peer, role: InstanceRole) -> list[Effect]:
        """An operator gave this worker its role under an earlier coordinator, which may have died before it told the
        worker. The worker may not be up here yet.
        """
        self._roles[peer] = role
        view = self._fleet.views.get(peer)
        return [] if view is None else self.assign(view, role)

    def assign(self, view: InstanceView, role: InstanceRole) -> list[Effect]:
        """Have the worker compute these phases for now."""
        self._fleet.set_role(view, role)
        return [Send(view.peer, SetRole(role))] if view.role_ordered is not None else []

    def restart(self, view: InstanceView) -> list[Effect]:
        """Have the worker end once it is empty, and start again."""
        view.told_to_come_back = True
        self._fleet.drain(view)
        return [Send(view.peer, Drain(comes_back=True))]

    def on_report(self, view: InstanceView) -> list[Effect]:
        """Tell the worker again what its report does not show, or learn what an earlier coordinator told it."""
        effects: list[Effect] = []
        ordered = self._cordons.get(view.peer.name, Cordon.OPEN)
        if view.peer not in self._known:
            self._known.add(view.peer)
            if view.peer.name in self._cordons:
                effects += self._order(view, ordered)
            elif view.cordon is not Cordon.OPEN:
                self._cordons[view.peer.name] = view.cordon
        elif view.report.cordon is not ordered:
            effects += self._order(view, ordered)
        role = self._roles.get(view.peer, view.role)
        if role is not view.role:
            self._fleet.set_role(view, role)
        if view.role_ordered is not None:
            effects.append(Send(view.peer, SetRole(view.role_ordered)))
        if view.told_to_come_back and not view.report.draining:
            effects.append(Send(view.peer, Drain(comes_back=True)))
        return effects

    def on_up(self, peer: Peer) -> None:
        self._known.discard(peer)  # it may have been known under the same incarnation

    def on_down(self, peer: Peer) -> None:
        self._known.discard(peer)
        self._roles.pop(peer, None)

    def _order(self, view: InstanceView, cordon: Cordon) -> list[Effect]:
        self._fleet.cordon(view, cordon)
        return [Send(view.peer, SetCordon(cordon))] if view.cordon_ordered is not None else []

    def validate(self) -> None:
        """Raises: AssertionError if an order and a view disagree."""
        for view in self._fleet.views.values():
            expected = self._cordons.get(view.peer.name, Cordon.OPEN)
            assert view.cordon is expected, f"{view.peer.name} is {view.cordon}, and was ordered to be {expected}"
            role = self._roles.get(view.peer, view.role)
            assert view.role is role, f"{view.peer.name} computes {view.role}, and was ordered to compute {role}"
        known = {instance.peer for instance in self._fleet.instances.values() if not isinstance(instance, NewInstance)}
        assert self._known == known, "the workers with a report are known"
