"""Which instance holds the checkpoints of which (``core.checkpoints.source``): one sorted ring for each kind.

Each instance holds the checkpoints of the instance before it in the ring, so no host memory is asked for twice. If an
instance comes or goes, only two instances change their holder.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from actorserve.core.effects import Send
from actorserve.core.messages import CheckpointTo, Peer
from actorserve.core.placement.instance_view import InstanceView

_REPEAT_S: Final = 10.0  # because a message may have been lost


class CheckpointRing:
    """Remembers the holder that each instance was told, and when."""

    def __init__(self) -> None:
        self._told: dict[Peer, tuple[Peer, float]] = {}

    def round(self, views: Iterable[InstanceView], now: float) -> list[Send]:
        """Tell instances their holders. The ring has the instances with a host pool that are not to empty."""
        rings: dict[str, list[Peer]] = defaultdict(list)
        for view in views:
            if view.report.host_total_bytes and not view.must_empty:
                rings[view.kind].append(view.peer)
        told, self._told = self._told, {}
        sends: list[Send] = []
        for ring in rings.values():
            ring.sort()
            for index, peer in enumerate(ring if len(ring) > 1 else ()):
                holder = ring[(index + 1) % len(ring)]
                last_holder, told_s = told.get(peer, (None, now))
                if last_holder != holder or now >= told_s + _REPEAT_S:
                    sends.append(Send(peer, CheckpointTo(holder)))
                    told_s = now
                self._told[peer] = holder, told_s
        return sends
