"""Who places a gateway's requests while the coordinator is gone: the gateway itself.

By the coordinator's own rule (``core.placement.dispatch``), from the loads that workers last reported and an account of
what this gateway has sent since. What others send meanwhile shows only in the reports, so together they may send a
worker more than it has room for; there it waits, or is refused and placed anew.

Whoever finds no room waits in its session, the more urgent first and then the earlier. A short outage needs no feedback
queue, nor instances that are kept for long requests: shorter ones may pass them.
"""

from collections.abc import Mapping

from actorserve.core.messages import LOCAL, LoadReport, Peer, Place, WorkerInfo
from actorserve.core.placement.fleet import Fleet
from actorserve.core.placement.instance_view import NewInstance


class FallbackPlacer:
    """Knows ``workers`` and what they last reported, and places by it. Made anew each time the coordinator goes."""

    def __init__(
        self,
        workers: Mapping[Peer, WorkerInfo],
        loads: Mapping[Peer, LoadReport],
        max_queue: int,
        placement_ttl_s: float,
        now: float,
    ) -> None:
        self._fleet = Fleet(max_queue, placement_ttl_s)
        for peer, worker in workers.items():
            self.meet(peer, worker)
        for peer, report in loads.items():
            self.on_report(peer, report, now)

    @property
    def room_tokens(self) -> int:
        """No request longer than this finds a place now; negative where none does."""
        return self._fleet.room_tokens

    @property
    def largest_tokens(self) -> int | None:
        """No worker that is there ever holds a longer request, however empty; None while none is there."""
        return self._fleet.largest_tokens

    def meet(self, peer: Peer, worker: WorkerInfo) -> None:
        """It gets requests from its first report on."""
        self._fleet.add(NewInstance(peer, worker.kind, worker.model))

    def lose(self, peer: Peer) -> None:
        """Whoever was placed there is to be placed anew. Unknown ones are ignored."""
        self._fleet.remove(peer)

    def on_report(self, peer: Peer, report: LoadReport, now: float) -> None:
        if peer in self._fleet.instances:
            self._fleet.on_report(peer, report, now)

    def place(self, place: Place, now: float) -> Peer | None:
        """The worker to start the request on, counted as sent there; None where none has room for it now."""
        self._fleet.expire(now)
        self._fleet.forget(place.request_id, place.epoch)
        view = self._fleet.choose(place)
        return None if view is None else self._fleet.place(view, LOCAL, place, now).instance
