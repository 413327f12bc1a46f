"""Who guards whose requests (``core.checkpoints.source``): a ring over the instances of each kind, by their names.

When one comes or goes, two have another guardian; and each guards one other, so nobody's memory is asked for twice.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from actorserve.core.effects import Send
from actorserve.core.messages import CheckpointTo, Peer
from actorserve.core.placement.fleet import InstanceView

_TELL_AGAIN_S: Final = 10.0  # for what was said may have been lost


class CheckpointRing:
    """What each instance was told."""

    def __init__(self) -> None:
        self._told: dict[Peer, tuple[Peer, float]] = {}

    def round(self, views: Iterable[InstanceView], now: float) -> list[Send]:
        """What instances are to be told now. Those guard that have a pool on their host, and do not terminate."""
        rings: dict[str, list[Peer]] = defaultdict(list)
        for view in views:
            if view.report is not None and view.report.host_total_bytes and not view.is_terminating:
                rings[view.kind].append(view.peer)
        told, self._told = self._told, {}
        orders: list[Send] = []
        for ring in rings.values():
            ring.sort()
            for index, peer in enumerate(ring if len(ring) > 1 else ()):
                holder = ring[(index + 1) % len(ring)]
                last, told_s = told.get(peer, (None, now))
                if last != holder or now >= told_s + _TELL_AGAIN_S:
                    orders.append(Send(peer, CheckpointTo(holder)))
                    told_s = now
                self._told[peer] = holder, told_s
        return orders
