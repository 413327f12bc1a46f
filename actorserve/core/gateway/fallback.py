"""Placement by the gateway itself, while the coordinator is gone.

The gateway applies the coordinator's own rule (``core.placement.dispatch``) to load reports, and counts the requests
that it has sent since. At first these are the reports of the coordinator's last digest. Then the workers report to the
gateway, which asks them to. What other gateways send shows only in later reports. If all gateways chose
the freest worker, that one would get all requests until its next report. Therefore each request goes to the better of
two workers, drawn by its id, and is handed over to the better of two token instances. Even so, the gateways together
may send a worker more than it has memory for; there a request waits, or is refused and placed again.

A token instance declines what it has no memory for. Such a request decodes where its prompt was computed, until a
coordinator moves it. The instances that a gateway drafts into the mixed pool are drafted for its own requests alone.

A worker that has not reported for a while gets no requests. Reports from before the outage count from its beginning.

A request that finds no room waits in its session: first by priority, then by arrival. A short outage needs neither a
feedback queue nor instances reserved for long requests, so shorter requests may pass longer ones.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import inf
from zlib import crc32

from actorserve.core.gateway.config import GatewayConfig
from actorserve.core.gateway.peers import KnownPeers
from actorserve.core.gateway.session import Session, SessionStage
from actorserve.core.messages import LOCAL, LoadReport, Peer, Place, Placed, WorkerInfo
from actorserve.core.placement.fleet import Fleet
from actorserve.core.placement.instance_view import InstanceView, NewInstance
from actorserve.core.pools.cluster_scheduler import ClusterScheduler
from actorserve.core.rng import hash64


class FallbackPlacer:
    """Places requests on the workers that the gateway knows. A new one is made each time the coordinator goes down."""

    def __init__(self, config: GatewayConfig, peers: KnownPeers, now: float) -> None:
        self._fleet = Fleet(config.max_queue_per_instance, config.placement_ttl_s, report_ttl_s=config.report_ttl_s)
        self._across_kinds = config.pools.across_kinds
        self._scheduler = ClusterScheduler(config.pools, self._fleet)
        self._min_scan_interval_s = config.retry_slack_s
        self._next_scan_s = -inf
        self._shortest_waiting_tokens = -inf  # no waiting session is shorter
        for peer, worker in peers.workers.items():
            self.add_worker(peer, worker)
        for peer, report in peers.loads.items():
            self.on_report(peer, report, now)

    def add_worker(self, peer: Peer, worker: WorkerInfo) -> None:
        """The worker gets requests from its first report on."""
        self._scheduler.on_down(peer)
        self._fleet.add(NewInstance(peer, worker.kind, worker.model))

    def remove_worker(self, peer: Peer) -> None:
        """The worker gets no more requests. An unknown peer is ignored."""
        self._fleet.remove(peer)
        self._scheduler.on_down(peer)

    def on_report(self, peer: Peer, report: LoadReport, now: float) -> None:
        self._scheduler.on_report(self._fleet.on_report(peer, report, now), now)

    def unheard(self, now: float) -> list[Peer]:
        """The workers that have not reported, or not for too long."""
        self._fleet.expire_reports(now)
        views = self._fleet.instances.values()
        return [view.peer for view in views if not isinstance(view, InstanceView) or view.is_stale]

    def is_too_large(self, num_tokens: int) -> bool:
        """Whether no worker that is up could ever hold so many tokens, however empty. False while no worker is up."""
        largest_tokens = self._fleet.largest_tokens
        return largest_tokens is not None and num_tokens > largest_tokens

    def place(self, place: Place, now: float) -> Placed | None:
        """The worker to start the request on, which then counts as sent there, and the one to decode it. None if no
        worker has room for it.
        """
        self._fleet.expire(now)
        self._fleet.expire_reports(now)
        self._fleet.forget(place.request_id, place.epoch)
        if self._across_kinds and place.kind:
            place = replace(place, kind="")
        pair = self._scheduler.choose(place, now, seed=hash64(crc32(place.request_id.encode()), place.epoch))
        if pair is None:
            self._shortest_waiting_tokens = min(self._shortest_waiting_tokens, place.num_tokens)
            return None
        return self._fleet.place(pair.prompt, LOCAL, place, now, token_view=pair.token)

    def forget(self, request_id: str, epoch: int) -> None:
        """Stop counting the request, under this or an earlier epoch, at the workers that were chosen for it."""
        self._fleet.forget(request_id, epoch)

    def sessions_that_may_fit(self, sessions: Iterable[Session], now: float) -> Iterator[Session]:
        """The waiting sessions to place now, the most urgent first and then the earliest. Place each before the next.

        A scan of thousands of waiting sessions is costly. So it is skipped if none of them can fit, and just after
        another scan, because reports of several workers arrive at nearly the same time. The next report or its own
        retry serves a session that is skipped.
        """
        if now < self._next_scan_s or self._fleet.room_tokens < self._shortest_waiting_tokens:
            return
        self._shortest_waiting_tokens = inf
        waiting = [session for session in sessions if session.stage is SessionStage.PLACING]
        if waiting:
            self._next_scan_s = now + self._min_scan_interval_s
        for session in sorted(waiting, key=lambda session: session.spec.priority):
            if session.num_tokens <= self._fleet.room_tokens:
                yield session
            else:
                self._shortest_waiting_tokens = min(self._shortest_waiting_tokens, session.num_tokens)
