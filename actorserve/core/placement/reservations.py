"""Reservations: instances that admit only one particular request, until they have room for it.

Short requests could otherwise take all room that comes free for ever, and a long one would starve.
"""

from collections.abc import Iterable

from actorserve.core.messages import Place
from actorserve.core.placement.dispatch import required_kind
from actorserve.core.placement.index import InstanceIndex
from actorserve.core.placement.instance_view import InstanceView


def instance_to_reserve(place: Place, index: InstanceIndex) -> InstanceView | None:
    """The instance with the most room of those that could hold the request and are not reserved; None if none is left.

    An instance that admits nothing now is never reserved, because no request could take its room anyway.
    """
    kind = required_kind(place, index)
    for view in index.most_room_first():
        if view.reserved_for is None and view.can_hold(place) and (kind is None or view.kind == kind):
            return view
    return None


class Reservations:
    """At most one instance for a request, and one request for an instance."""

    def __init__(self) -> None:
        self._views: dict[str, InstanceView] = {}  # by the id of the request that each is reserved for

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._views

    @property
    def request_ids(self) -> list[str]:
        return list(self._views)

    def add(self, view: InstanceView, place: Place) -> None:
        view.reserved_for = place
        self._views[place.request_id] = view

    def release(self, request_id: str) -> InstanceView | None:
        """The instance that was reserved for the request and no longer is; None if none was."""
        view = self._views.pop(request_id, None)
        if view is not None:
            view.reserved_for = None
        return view

    def release_instance(self, view: InstanceView) -> None:
        if view.reserved_for is not None:
            self.release(view.reserved_for.request_id)

    def validate(self, views: Iterable[InstanceView]) -> None:
        """Raises: AssertionError if a request and its reserved instance do not name each other."""
        reserved = {view.reserved_for.request_id: view for view in views if view.reserved_for is not None}
        assert reserved.keys() == self._views.keys(), "every reservation is of one known instance"
        for request_id, view in reserved.items():
            assert self._views[request_id] is view, f"the instance reserved for {request_id} names it"
            assert view.is_healthy, f"the instance reserved for {request_id} is healthy"
            assert view.reserved_for is not None
            assert view.can_hold(view.reserved_for), f"the instance reserved for {request_id} can hold it"
