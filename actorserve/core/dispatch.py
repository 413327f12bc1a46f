"""Dispatch: which instance a request goes to (Llumnix, section 4.4.3: to the highest freeness).

The load reports that a dispatcher acts on are always a little old, and the usual error of such dispatchers is to send
a burst of requests to whoever looked free a moment ago. So each ``InstanceView`` carries its own account of what was
placed there and is not yet in a report, and counts it as if it ran already.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from actorserve.core.blocks import blocks_for
from actorserve.core.freeness import freeness
from actorserve.core.messages import LoadReport, ModelInfo, Peer, Place, Placed


@dataclass(frozen=True, slots=True)
class PlacementUnderWay:
    """A placement that no load report has confirmed yet."""

    gateway: Peer
    placed: Placed
    num_blocks: int
    expires_s: float


@dataclass(slots=True)
class InstanceView:
    """An instance as the dispatcher knows it: its last report, and what has been sent to it since."""

    peer: Peer
    kind: str
    model: ModelInfo
    report: LoadReport | None = None
    under_way: dict[str, PlacementUnderWay] = field(default_factory=dict)  # by request id, in the order of placement
    num_blocks_under_way: int = 0

    @property
    def is_dispatchable(self) -> bool:
        """It has reported and is not terminating."""
        return self.report is not None and not self.report.draining

    def on_report(self, report: LoadReport) -> None:
        """Take a newer report; what it has seen is under way no more. An older one changes nothing."""
        if self.report is not None and report.sequence <= self.report.sequence:
            return
        self.report = report
        for request_id in report.accepted:
            self.forget(request_id)

    def place(self, gateway: Peer, place: Place, expires_s: float) -> Placed:
        """Count the request as sent here. Raises: ValueError before the first report."""
        if self.report is None:
            raise ValueError(f"{self.peer} has not reported")
        self.forget(place.request_id)
        placed = Placed(place.request_id, place.epoch, self.peer)
        num_blocks = blocks_for(place.num_tokens, self.report.tokens_per_block)
        self.under_way[place.request_id] = PlacementUnderWay(gateway, placed, num_blocks, expires_s)
        self.num_blocks_under_way += num_blocks
        return placed

    def forget(self, request_id: str) -> None:
        """Count the request no more. Unknown ids are ignored."""
        placement = self.under_way.pop(request_id, None)
        if placement is not None:
            self.num_blocks_under_way -= placement.num_blocks

    def has_room(self, num_tokens: int) -> bool:
        """Whether the memory that is usable there now, all of it, holds so many tokens' KV. False before a report."""
        if self.report is None:
            return False
        num_blocks = blocks_for(num_tokens, self.report.tokens_per_block)
        return num_blocks * self.report.bytes_per_block <= self.report.kv_total_bytes

    def freeness(self) -> float:
        """F over what was reported and what is under way; minus infinity before the first report."""
        if self.report is None:
            return float("-inf")
        return freeness(
            self.report.kv_total_bytes,
            self.report.virtual_usage_bytes + self.num_blocks_under_way * self.report.bytes_per_block,
            self.report.num_running + len(self.under_way),
            terminating=self.report.draining,
        )


def choose_instance(instances: Iterable[InstanceView], place: Place) -> InstanceView | None:
    """The freest instance that can serve the request; None where there is none now.

    One whose usable memory holds the request now goes before any that would refuse it. Among these one of the kind that
    made the request's tokens so far goes before any other, so that the answer stays the same. Ties end on the name.
    """
    candidates = [
        view
        for view in instances
        if view.is_dispatchable and view.peer != place.avoid and place.num_tokens <= view.model.max_tokens
    ]
    candidates = [view for view in candidates if view.has_room(place.num_tokens)] or candidates
    same_kind = [view for view in candidates if view.kind == place.kind]
    return max(same_kind or candidates, key=lambda view: (view.freeness(), view.peer.name), default=None)
