"""The coordinator without sockets, on a virtual clock: the CPU time of its decisions, without that of its load.

The real actor, membership, core, envelopes and codec read a simulated cluster's frames and write their own; only ZeroMQ
and the event loop are missing. Only the actor's work is timed.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from actorserve.actors.coordinator import CoordinatorActor
from actorserve.actors.membership import COORDINATOR_NAME, Membership, WatchTimes
from actorserve.actors.node import Node
from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.cluster.state import ClusterState
from actorserve.core.messages import PROTOCOL_VERSION, Hello, Message, Peer, Role
from actorserve.settings import ClusterSettings
from actorserve.wire.transport import Framing, TransportLimits
from tools.benchmarks.cluster.simulated_cluster import Shape, SimulatedCluster, Window
from tools.benchmarks.common.errors import BenchError

_TURN_S: Final = 0.001  # of virtual time; frames that arrive within a turn are handled together
_MAX_QUEUE: Final = 2**20
_INCARNATION: Final = 1
_ADDRESS: Final = "memory"


class _Transport:
    """Implements ``Transport`` between an actor and a caller that feeds it frames."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.sent: list[bytes] = []
        self._framing = Framing(Peer(COORDINATOR_NAME, _INCARNATION), TransportLimits(), clock)
        self._frames: deque[bytes] = deque()

    def feed(self, frame: bytes) -> None:
        self._frames.append(frame)

    @property
    def me(self) -> Peer:
        return self._framing.me

    @property
    def address(self) -> str:
        return _ADDRESS

    @property
    def counts(self) -> Counter[str]:
        return self._framing.counter.counts

    def reincarnate(self, incarnation: int) -> None:
        self._framing.reincarnate(incarnation)

    def connect(self, peer: Peer, address: str, *, takes_bundles: bool = False) -> bool:
        return True

    def disconnect(self, peer: Peer) -> None:
        self._framing.forget(peer)

    def send(self, peer: Peer, message: Message) -> bool:
        body = self._framing.encode(peer, message)
        if body is not None:
            self.sent.append(self._framing.pack(peer, [body]))
        return body is not None

    def take(self, limit: int = 256) -> list[tuple[Peer, Message]]:
        frames = [self._frames.popleft() for _ in range(min(limit, len(self._frames)))]
        return [unpacked for frame in frames for unpacked in self._framing.unpack(frame)]

    def on_arrival(self, callback: Callable[[], None]) -> None:
        """Nothing waits, because the node takes frames at the steps of a virtual clock."""

    def on_refusal(self, callback: Callable[[str], None]) -> None:
        """Nothing is refused, because there are no keys."""

    def close(self) -> None:
        self._frames.clear()


class CoordinatorAlone:
    """A coordinator and its simulated cluster, which have connected.

    No worker's queue is ever full, because a full queue would limit the requests between two load reports, and this
    measures decisions alone. Raises: BenchError, if a process does not connect.
    """

    def __init__(self, num_workers: int, num_gateways: int, settings: ClusterSettings) -> None:
        self._now = 0.0
        self._cpu_s = 0.0
        self._transport = _Transport(lambda: self._now)
        membership = Membership(
            self._transport,
            Hello(PROTOCOL_VERSION, Role.COORDINATOR, _ADDRESS),
            {self._transport.me.name: _ADDRESS},
            WatchTimes(settings.heartbeat_s, settings.death_after_s),
        )
        core = ClusterState(ClusterConfig(settings.max_waiting_requests, settings.retry_s, _MAX_QUEUE))
        self._actor = CoordinatorActor(core, Node(self._transport, membership, lambda: self._now))
        self._actor.start()
        shape = Shape(num_workers, num_gateways, (_ADDRESS,), settings.load_report_s, settings.heartbeat_s)
        self._cluster = SimulatedCluster(shape, _INCARNATION, self._now)
        self._run_until(1.0)
        if self._cluster.num_met < self._cluster.num_processes:
            raise BenchError(f"only {self._cluster.num_met} of {self._cluster.num_processes} met the coordinator")
        self.joining_cpu_s = self._cpu_s
        self._run_until(2.0)  # until every worker has reported

    def cpu_share(self, rate: float, seconds: float) -> float:
        """The CPU seconds of a second with ``rate`` requests. Raises: BenchError, if a request gets no place."""
        window = Window(rate, self._now + 0.5, self._now + 0.5 + seconds)
        self._cluster.load(window, self._now)
        self._run_until(window.begin_s)
        before_s = self._cpu_s
        self._run_until(window.end_s)
        share = (self._cpu_s - before_s) / seconds
        self._run_until(window.end_s + 0.5)
        if not window.is_answered or window.num_refused:
            raise BenchError(f"at {rate:.0f} requests/s some requests got no place, because there are too few workers")
        return share

    def _run_until(self, until_s: float) -> None:
        while self._now < until_s:
            self._now += _TURN_S
            for _, frame in self._cluster.due(self._now):
                self._transport.feed(frame)
            began = time.thread_time()
            while self._actor.step():
                pass
            self._cpu_s += time.thread_time() - began
            for frame in self._transport.sent:
                self._cluster.take(frame, self._now)
            self._transport.sent.clear()
