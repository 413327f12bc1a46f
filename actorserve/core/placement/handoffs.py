"""Handoffs in flight: the token instances that are to get requests whose prompts other instances compute.

The token instance is chosen when the request is placed, because its memory must be there when the prompt is computed
(Splitwise, section 4.2). It reserves the memory when the copy of the KV begins, and from then on its reports show it.
A handoff is in flight until a token instance has accepted the request. The memory counts once all the while, because
what a report shows as reserved is not added to it (``InstanceView.coming_bytes``).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from actorserve.core.kv.block_allocator import rows_for
from actorserve.core.messages import InstanceRole, Peer
from actorserve.core.placement.instance_view import InstanceView

TTL_S: Final = 10.0
"""A handoff that has not come by then may never come: the request ended, or stays where its prompt was computed."""


@dataclass(frozen=True, slots=True)
class _Handoff:
    view: InstanceView
    epoch: int
    gateway: Peer
    num_blocks: int
    expires_s: float


class HandoffsInFlight:
    """At most one token instance for a request. A handoff leaves as a placement does
    (``core.placement.placements``).
    """

    def __init__(self) -> None:
        self._handoffs: dict[str, _Handoff] = {}  # by request id, in the order in which they expire

    def add(self, view: InstanceView, request_id: str, epoch: int, gateway: Peer, num_tokens: int, now: float) -> None:
        """Count a request of ``num_tokens`` so far, which is not in flight, as coming to ``view``."""
        num_blocks = view.report.row_shape.num_blocks(rows_for(num_tokens, view.report.tokens_per_block))
        self._handoffs[request_id] = _Handoff(view, epoch, gateway, num_blocks, now + TTL_S)
        view.num_handoffs += 1
        view.num_handoff_blocks += num_blocks

    def drop(self, request_id: str) -> InstanceView | None:
        """Stop counting a request. Returns the instance that it was to come to; None if it is not in flight."""
        handoff = self._handoffs.pop(request_id, None)
        if handoff is None:
            return None
        handoff.view.num_handoffs -= 1
        handoff.view.num_handoff_blocks -= handoff.num_blocks
        return handoff.view

    def confirm(self, view: InstanceView, request_ids: Iterable[str]) -> list[InstanceView]:
        """Stop counting requests that ``view`` has accepted: as their token instance, or as another one to which they
        have moved. Returns the other instances that they were to come to.
        """
        left = []
        for request_id in request_ids:
            handoff = self._handoffs.get(request_id)
            if handoff is not None and (handoff.view is view or view.role is InstanceRole.TOKEN):
                self.drop(request_id)
                if handoff.view is not view:
                    left.append(handoff.view)
        return left

    def drop_instance(self, view: InstanceView) -> None:
        for request_id in [name for name, handoff in self._handoffs.items() if handoff.view is view]:
            self.drop(request_id)

    def epoch_of(self, request_id: str) -> int | None:
        """The epoch under which the request was placed; None if it is not in flight."""
        handoff = self._handoffs.get(request_id)
        return None if handoff is None else handoff.epoch

    def of_gateway(self, gateway: Peer) -> list[str]:
        """The ids of the requests that ``gateway`` asked for."""
        return [request_id for request_id, handoff in self._handoffs.items() if handoff.gateway == gateway]

    def first_expired(self, now: float) -> str | None:
        """The id of the oldest request whose time is over; None if there is none."""
        first = next(iter(self._handoffs), None)
        return first if first is not None and self._handoffs[first].expires_s <= now else None

    def next_expiry_s(self) -> float | None:
        first = next(iter(self._handoffs), None)
        return None if first is None else self._handoffs[first].expires_s

    def validate(self, views: Iterable[InstanceView]) -> None:
        """Raises: AssertionError if the views count other handoffs than those in flight."""
        known = list(views)
        for view in known:
            blocks = [handoff.num_blocks for handoff in self._handoffs.values() if handoff.view is view]
            assert view.num_handoffs == len(blocks), f"{view.peer.name} counts the handoffs in flight to it"
            assert view.num_handoff_blocks == sum(blocks), f"{view.peer.name} counts the blocks of these"
        ids = set(map(id, known))
        assert all(id(handoff.view) in ids for handoff in self._handoffs.values()), "handoffs go to known instances"
