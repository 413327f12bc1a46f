"""Placements in flight: which instance each request was sent to, until a load report confirms it."""

from collections.abc import Iterable, Iterator

from actorserve.core.kv.block_allocator import rows_for
from actorserve.core.messages import Peer, Placed
from actorserve.core.placement.instance_view import InstanceView, PlacementInFlight


class PlacementsInFlight:
    """A placement leaves when a report confirms it, when it is taken back, or ``ttl_s`` seconds after it was made.

    It expires because its gateway may have died before it sent the request.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._views: dict[str, InstanceView] = {}  # by request id, in the order of placement, which is that of expiry

    def get(self, request_id: str) -> PlacementInFlight | None:
        view = self._views.get(request_id)
        return None if view is None else view.in_flight[request_id]

    def add(self, view: InstanceView, gateway: Peer, placed: Placed, num_tokens: int, now: float) -> None:
        """Count a request that is not in flight, with ``num_tokens`` to prefill, as sent to ``view``."""
        self._views[placed.request_id] = view
        num_blocks = view.report.row_shape.num_blocks(rows_for(num_tokens, view.report.tokens_per_block))
        view.add_placement(PlacementInFlight(gateway, placed, num_tokens, num_blocks, now + self._ttl_s))

    def drop(self, request_id: str) -> InstanceView | None:
        """Stop counting a request. Returns the instance that it was sent to; None if it is not in flight."""
        view = self._views.pop(request_id, None)
        if view is not None:
            view.drop_placement(request_id)
        return view

    def confirm(self, view: InstanceView, request_ids: Iterable[str]) -> None:
        """Stop counting requests that ``view`` has accepted, except those that were placed elsewhere since."""
        for request_id in request_ids:
            if self._views.get(request_id) is view:
                self.drop(request_id)

    def drop_instance(self, view: InstanceView) -> None:
        for request_id in view.in_flight:
            del self._views[request_id]

    def of_gateway(self, gateway: Peer) -> list[str]:
        """The ids of the requests that ``gateway`` asked for."""
        return [request_id for request_id, placement in self._placements() if placement.gateway == gateway]

    def first_expired(self, now: float) -> str | None:
        """The id of the oldest request whose time is over; None if there is none."""
        first = next(self._placements(), None)
        return first[0] if first is not None and first[1].expires_s <= now else None

    def next_expiry_s(self) -> float | None:
        first = next(self._placements(), None)
        return None if first is None else first[1].expires_s

    def validate(self, views: Iterable[InstanceView]) -> None:
        """Raises: AssertionError if a request does not count at exactly the instance that it was sent to."""
        num_counted = 0
        for view in views:
            for request_id, placement in view.in_flight.items():
                num_counted += 1
                assert self._views.get(request_id) is view, f"{request_id} counts where it was sent last"
                assert placement.placed.request_id == request_id, f"{request_id} has its own placement"
                assert placement.placed.instance == view.peer, f"{request_id} was sent to the instance that counts it"
            num_tokens = sum(placement.num_tokens for placement in view.in_flight.values())
            assert view.num_tokens_in_flight == num_tokens, "tokens in flight are those of the placements in flight"
            num_blocks = sum(placement.num_blocks for placement in view.in_flight.values())
            assert view.num_blocks_in_flight == num_blocks, "blocks in flight are those of the placements in flight"
        assert num_counted == len(self._views), "every placement in flight counts at one known instance"
        expiries_s = [placement.expires_s for _, placement in self._placements()]
        assert expiries_s == sorted(expiries_s), "placements expire in the order in which they were made"

    def _placements(self) -> Iterator[tuple[str, PlacementInFlight]]:
        # A compiled generator expression would build the whole list, although the callers mostly take the first.
        for request_id, view in self._views.items():
            yield request_id, view.in_flight[request_id]
