"""Reservations: instances that admit only one particular request, until they have room for it.

Otherwise short requests could keep taking all room that becomes free, and a long request would starve.
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
    firsts = (
        next((view for view in found.most_room_first() if view.reserved_for is None and view.can_hold(place)), None)
        for found in index.of_kind(required_kind(place, index))
    )
    return max(filter(None, firsts), key=lambda view: (view.admitted_tokens, view.peer), default=None)


class Reservations:
    """At most one instance for a request, and one request for an instance."""

    def __init__(self) -> None:
        self._views: dict[str, InstanceView] = {}  # the reserved instance, by request id

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
