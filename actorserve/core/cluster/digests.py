"""Load digests: how gateways know the load of all instances, to place by themselves once the coordinator is gone.

If each worker reported to each gateway, 1,000 workers and 100 gateways would exchange half a million messages a second.
Therefore workers report to the coordinator alone, and the coordinator sends each gateway all reports in one message, at
a lower rate. Workers report to the gateways that have no coordinator (``core.gateway.placer``).
"""

from collections.abc import Iterable
from dataclasses import replace

from actorserve.core.effects import Send
from actorserve.core.messages import LoadDigest, Peer
from actorserve.core.placement.instance_view import InstanceView


class LoadDigests:
    """The gateways that are up, and when they get the next digest: ``every_s`` seconds after the last one."""

    def __init__(self, every_s: float) -> None:
        self.next_s: float | None = None  # None without gateways
        self._every_s = every_s
        self._gateways: dict[Peer, None] = {}  # in the order in which they came up

    def on_up(self, gateway: Peer, views: Iterable[InstanceView], now: float) -> list[Send]:
        """A gateway has come up, and gets a digest at once."""
        self._gateways[gateway] = None
        if self.next_s is None:
            self.next_s = now + self._every_s
        return [Send(gateway, self._digest(views))]

    def on_down(self, peer: Peer) -> None:
        self._gateways.pop(peer, None)
        if not self._gateways:
            self.next_s = None

    def on_tick(self, views: Iterable[InstanceView], now: float) -> list[Send]:
        if self.next_s is None or now < self.next_s:
            return []
        self.next_s = now + self._every_s
        digest = self._digest(views)
        return [Send(gateway, digest) for gateway in self._gateways]

    def _digest(self, views: Iterable[InstanceView]) -> LoadDigest:
        """What the instances said last, except those that have been silent for too long. The host of the first gateway
        by name shows it.
        """
        reports = {view.peer: replace(view.report, accepted=()) for view in views if not view.is_stale}
        return LoadDigest(tuple(reports), tuple(reports.values()), min(self._gateways).host)
