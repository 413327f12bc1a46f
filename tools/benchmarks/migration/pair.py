"""Two real workers, and in this process a gateway that times their tokens and a coordinator that follows orders.

The workers are started as in production, each a process with its engine, under a supervisor. The gateway's sessions are
the real ones; times are taken as they hand out tokens.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from actorserve.actors.cluster_actor import ClusterActor
from actorserve.actors.gateway import GatewayActor
from actorserve.actors.membership import COORDINATOR_NAME
from actorserve.actors.node import Node, open_node
from actorserve.cluster.network import LocalNetwork
from actorserve.core.effects import Deliver, Effect, End, Send
from actorserve.core.gateway.config import GatewayConfig
from actorserve.core.gateway.state import GatewayState
from actorserve.core.messages import (
    PROTOCOL_VERSION,
    CheckpointTo,
    Hello,
    LoadReport,
    Message,
    MigrateTo,
    Peer,
    PeerDown,
    PeerUp,
    Place,
    Placed,
    RequestSpec,
    Role,
    Start,
    Transfer,
)
from actorserve.processes import launch
from actorserve.processes.child import write_settings
from actorserve.processes.supervision_tree import supervision_tree
from actorserve.settings import Settings
from tools.benchmarks.common.errors import BenchError

SOURCE, DESTINATION = "worker-0", "worker-1"
GATEWAY = "gateway-0"
_TIMEOUT_S = 300.0  # for each condition that a measurement waits for
_POLL_S = 0.02
_ORDER_TTL_S = 30.0


@dataclass(slots=True)
class Stream:
    """One request as its client sees it; times in seconds on the host's monotonic clock, which journals use, too.

    ``migration`` is the migration that copied its KV before the hand-over; None if no KV was copied.
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    opened_s: float = 0.0
    handed_over_s: float | None = None
    migration: Transfer | None = None
    has_ended: bool = False

    def put(self, effect: Deliver | End) -> None:
        """Note when tokens and the end come (``actors.gateway.Stream``)."""
        match effect:
            case Deliver(token_ids=token_ids):
                self.token_ids += token_ids
                self.times_s += [time.monotonic()] * len(token_ids)
            case End():
                self.has_ended = True


class _Placer:
    """A coordinator's core: requests go where ``places`` says, or to the destination if that worker has failed them;
    an injected MigrateTo or CheckpointTo goes to the source.
    """

    def __init__(self) -> None:
        self.workers: dict[str, Peer] = {}
        self.reports: dict[str, LoadReport] = {}  # the latest of each worker, which reports to its coordinator alone
        self.places: dict[str, tuple[str, str | None]] = {}  # a request's worker, and its token instance

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        match message:
            case PeerUp(peer=peer, role=Role.WORKER):
                self.workers[peer.name] = peer
            case PeerDown(peer=peer):
                self.workers.pop(peer.name, None)
                self.reports.pop(peer.name, None)
            case LoadReport() if sender is not None:
                self.reports[sender.name] = message
            case Place(request_id=request_id, epoch=epoch, avoid=avoid) if sender is not None:
                name, token_name = self.places[request_id] if avoid is None else (DESTINATION, None)
                token_instance = None if token_name is None else self.workers[token_name]
                return [Send(sender, Placed(request_id, epoch, self.workers[name], 0.0, token_instance))]
            case MigrateTo() | CheckpointTo():
                return [Send(self.workers[SOURCE], message)]
        return []

    def next_deadline(self) -> float | None:
        return None


class _TimedSessions(GatewayState):
    """A gateway's sessions that report each hand-over, and note when they last noticed a worker's death."""

    def __init__(self, config: GatewayConfig, on_handed_over: Callable[[Start], None]) -> None:
        super().__init__(config)
        self.noticed_s: dict[str, float] = {}
        self._on_handed_over = on_handed_over

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        if isinstance(message, PeerDown):
            self.noticed_s[message.peer.name] = time.monotonic()
        num_before = self.counts.num_handed_over
        effects = super().handle(message, now, sender)
        if self.counts.num_handed_over > num_before:
            for effect in effects:
                if isinstance(effect, Send) and isinstance(effect.message, Start):
                    self._on_handed_over(effect.message)
        return effects


class Pair:
    """A source and a destination with these resolved ``settings``, and their sockets in ``runtime_dir``.

    ``specs`` start the workers. ``actors`` are the coordinator and the gateway; ``open_actors`` makes them on the
    running event loop.
    """

    def __init__(self, name: str, settings: Settings, placement: launch.Placement, runtime_dir: Path) -> None:
        self.name = name
        self._settings = settings
        self._runtime_dir = runtime_dir
        write_settings(settings, file := runtime_dir / "settings.json")
        children = supervision_tree(placement, settings, file, runtime_dir).children
        workers = [spec for spec in children if spec.name in (SOURCE, DESTINATION)]
        self.specs = [replace(spec, name=f"{name} {spec.name}") for spec in workers]
        cluster = settings.cluster
        self._sessions = _TimedSessions(
            GatewayConfig(cluster.retry_s, cluster.no_instance_timeout_s, cluster.resume_timeout_s),
            self._on_handed_over,
        )
        self._placer = _Placer()
        self._streams: dict[str, Stream] = {}
        self.actors: list[ClusterActor] = []
        self._gateway: GatewayActor  # from open_actors on

    @property
    def journal_dir(self) -> Path | None:
        return self._settings.cluster.journal_dir

    def open_actors(self) -> None:
        coordinator = ClusterActor(self._placer, self._node(COORDINATOR_NAME, Role.COORDINATOR))
        node = self._node(GATEWAY, Role.GATEWAY)
        self._gateway = GatewayActor(self._sessions, node, self._settings.http.max_open_requests)
        self.actors = [coordinator, self._gateway]

    def _node(self, name: str, role: Role) -> Node:
        hello = Hello(PROTOCOL_VERSION, role)
        return open_node(name, hello, self._settings.cluster, LocalNetwork(self._runtime_dir))

    async def wait_met(self) -> None:
        """Raises: BenchError."""
        await self._until(lambda: len(self.reports()) == len(self._placer.workers) == 2, "the workers to report")

    def open(self, request: RequestSpec, place: str, token_instance: str | None = None) -> Stream:
        """Begin a request on ``place``, which hands it over after its prompt, if there is a ``token_instance``."""
        self._placer.places[request.request_id] = place, token_instance
        stream = Stream(request.request_id, opened_s=time.monotonic())
        self._streams[request.request_id] = stream
        self._gateway.submit(request, stream)
        return stream

    def order_move(self, num_bytes: int) -> float:
        """Tell the source to move ``num_bytes`` of KV to the destination. Returns the time of the order."""
        destination = self._placer.workers[DESTINATION]
        self.actors[0].tell(MigrateTo(destination, num_bytes, _ORDER_TTL_S))
        return time.monotonic()

    def order_checkpoints(self) -> None:
        """Tell the source to send its checkpoints, if its settings make any, to the destination."""
        self.actors[0].tell(CheckpointTo(self._placer.workers[DESTINATION]))

    def pid(self, name: str) -> int:
        """The process id of a worker. Raises: BenchError."""
        [command] = [spec.command for spec in self.specs if spec.name == f"{self.name} {name}"]
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
            if parent == os.getpid() and tuple(arguments[:-1]) == command:
                return int(folder.name)
        raise BenchError(f"{self.name}: {name} does not run")

    async def kill(self, name: str) -> tuple[float, float]:
        """Kill a worker with SIGKILL. Returns when it was killed, and when the gateway noticed. Raises: BenchError."""
        self._sessions.noticed_s.pop(name, None)
        os.kill(self.pid(name), signal.SIGKILL)
        killed_s = time.monotonic()
        await self._until(lambda: name in self._sessions.noticed_s, f"the death of {name} to be noticed")
        return killed_s, self._sessions.noticed_s[name]

    async def until_checkpointed(self, num_bytes: int) -> None:
        """Return when ``num_bytes`` of checkpoints have been copied from the source in all. Raises: BenchError."""
        await self._until(
            lambda: self.reports()[SOURCE].checkpointed_bytes >= num_bytes, f"checkpoints of {num_bytes} bytes"
        )

    async def until_made(self, streams: Iterable[Stream], num_tokens: int) -> None:
        """Return when each stream has ``num_tokens``. Raises: BenchError."""
        for stream in streams:
            await self._until(
                lambda stream=stream: stream.has_ended or len(stream.times_s) >= num_tokens,  # type: ignore[misc]
                f"{num_tokens} tokens of {stream.request_id}",
            )
            if stream.has_ended:
                raise BenchError(f"{self.name}: {stream.request_id} ended after {len(stream.times_s)} tokens")

    async def until_handed_over(self, stream: Stream) -> float:
        """Returns the time of the hand-over. Raises: BenchError, also if a move has failed since the last report."""
        num_failed = self.reports()[SOURCE].num_migrations_failed

        def has_failed() -> bool:
            return self.reports()[SOURCE].num_migrations_failed > num_failed

        await self._until(lambda: stream.handed_over_s is not None or has_failed(), f"{stream.request_id} to be moved")
        if stream.handed_over_s is None:
            raise BenchError(f"{self.name}: {stream.request_id} was not moved, though the source began a migration")
        return stream.handed_over_s

    async def end_all(self) -> None:
        """Close all requests, and wait until the workers report none. Raises: BenchError."""
        for request_id in self._streams:
            self._gateway.release(request_id)
        await self.fresh_reports()
        await self._until(
            lambda: (
                not any(
                    report.num_running + report.num_waiting + report.num_migrating for report in self.reports().values()
                )
            ),
            "the requests to end",
        )
        self._streams.clear()
        self._placer.places.clear()

    def reports(self) -> dict[str, LoadReport]:
        """Each worker's latest report."""
        return dict(self._placer.reports)

    async def fresh_reports(self) -> dict[str, LoadReport]:
        """The second next report of each worker, because the next one may have been sent before this call.

        Raises: BenchError.
        """
        sequences = {name: report.sequence for name, report in self.reports().items()}
        await self._until(
            lambda: all(report.sequence >= sequences[name] + 2 for name, report in self.reports().items()),
            "the workers to report",
        )
        return self.reports()

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                while not condition():  # noqa: ASYNC110 - the condition changes in other processes
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise BenchError(f"{self.name}: waited {_TIMEOUT_S:.0f} s for {what}") from None

    def _on_handed_over(self, start: Start) -> None:
        stream = self._streams.get(start.request.request_id)
        if stream is not None:
            stream.handed_over_s = time.monotonic()
            stream.migration = start.transfer
