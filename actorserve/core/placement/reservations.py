"""Reservations: instances that admit only one particular request, until they have room for it.

Otherwise short requests could keep taking all room that becomes free, and a long request would starve. But no other
request may use a reserved instance's room. Therefore at most one instance in sixteen of a kind is reserved. In a fleet
that is too small for this share, one instance may be reserved, but only for a request that is overdue, because this
takes a large part of the fleet from the short requests.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from actorserve.core.messages import Place
from actorserve.core.placement.dispatch import groups_for
from actorserve.core.placement.index import InstanceIndex
from actorserve.core.placement.instance_view import InstanceView

INSTANCES_PER_RESERVATION: Final = 16


class Reservations:
    """At most one instance for a request, and one request for an instance."""

    def __init__(self) -> None:
        self._views: dict[str, InstanceView] = {}  # the reserved instance, by request id
        self._num_of_kind: Counter[str] = Counter()  # reserved instances

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._views

    @property
    def request_ids(self) -> list[str]:
        return list(self._views)

    def instance_for(self, place: Place, index: InstanceIndex, *, is_overdue: bool) -> InstanceView | None:
        """The instance with the most room of those that could hold the request and may be reserved; None without any.

        An instance that admits nothing now is never reserved, because no request could take its room anyway.
        """
        best: InstanceView | None = None
        for found in groups_for(place, index):
            share = len(found) // INSTANCES_PER_RESERVATION
            if self._num_of_kind[found.kind] >= max(share, int(is_overdue)):
                continue
            for view in found.most_room_first():
                if view.reserved_for is None and view.can_hold(place):
                    if best is None or (view.admitted_tokens, view.peer) > (best.admitted_tokens, best.peer):
                        best = view
                    break
        return best

    def add(self, view: InstanceView, place: Place) -> None:
        view.reserved_for = place
        self._views[place.request_id] = view
        self._num_of_kind[view.kind] += 1

    def release(self, request_id: str) -> InstanceView | None:
        """The instance that was reserved for the request and no longer is; None if none was."""
        view = self._views.pop(request_id, None)
        if view is not None:
            view.reserved_for = None
            self._num_of_kind[view.kind] -= 1
        return view

    def release_instance(self, view: InstanceView) -> None:
        if view.reserved_for is not None:
            self.release(view.reserved_for.request_id)

    def release_astray(self, index: InstanceIndex) -> list[InstanceView]:
        """Release the instances that the requests do not wait for any more, after an instance has changed its pool or
        what it could hold. Returns these instances.
        """
        astray = [
            view
            for view in self._views.values()
            if view.reserved_for is not None and index.group_of(view) not in groups_for(view.reserved_for, index)
        ]
        for view in astray:
            self.release_instance(view)
        return astray

    def validate(self, views: Iterable[InstanceView]) -> None:
        """Raises: AssertionError if a request and its reserved instance do not name each other."""
        num_reserved = 0
        for view in views:
            place = view.reserved_for
            if place is not None:
                num_reserved += 1
                assert self._views.get(place.request_id) is view, (
                    f"{view.peer.name} is what {place.request_id} reserved"
                )
                assert view.is_healthy, f"{view.peer.name} is reserved, so it is healthy"
                assert view.can_hold(place), f"{view.peer.name} is reserved for {place.request_id}, so it can hold it"
        assert num_reserved == len(self._views), "every reservation is of one known instance"
        num_of_kind = Counter(view.kind for view in self._views.values())
        assert +self._num_of_kind == num_of_kind, "the reserved instances of a kind are counted"
