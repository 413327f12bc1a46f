"""Many workers and some gateways as their coordinator sees them: real frames, no processes. Time is an argument.

Workers report their loads, and accept the requests that the coordinator places on them; a request runs for
``RUNNING_S``. Every process says hello, and follows the coordinator once it serves; then it sends heartbeats. Reports
and heartbeats are spread evenly over their periods, and requests arrive at random (Poisson). The caller moves the
frames.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack

from actorserve.actors.membership import COORDINATOR_NAME
from actorserve.core.messages import (
    PROTOCOL_VERSION,
    Following,
    Heartbeat,
    Hello,
    LoadReport,
    Message,
    ModelInfo,
    Peer,
    Place,
    Placed,
    Refused,
    Role,
    Serving,
    Speed,
    WorkerInfo,
)
from actorserve.wire.codec import WIRE_TAGS, decode, encode
from actorserve.wire.envelope import ANY_INCARNATION, HeadReader, make_head

RUNNING_S: Final = 1.0
_ASK_AGAIN_S: Final = 2.0
_ASKING_AT_ONCE: Final = 32  # processes that say hello at once; the others wait
_MODEL: Final = ModelInfo("model", 32_000, 8192)
_SPEED: Final = Speed((64, 2048), (0.01, 0.3), 0.02)
_BYTES_PER_BLOCK: Final = 2 * 2**20
_TOKENS_PER_BLOCK: Final = 16
_BLOCKS_PER_REQUEST: Final = 64
_NUM_BLOCKS: Final = (
    2**16 * _BLOCKS_PER_REQUEST
)  # more than any request needs, so that the coordinator alone limits the rate
_MIN_TOKENS, _MAX_TOKENS = 64, 1024
_TAGS: Final = {cls: tag for tag, cls in WIRE_TAGS.items()}
_PLACED, _REFUSED, _HELLO, _SERVING = (_TAGS[cls] for cls in (Placed, Refused, Hello, Serving))
_FIXARRAY: Final = range(0x90, 0xA0)  # msgpack's first byte of a list of up to 15

Outgoing = tuple[int, bytes]
"""The number of the link to send it on, and a frame."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of processes. ``addresses`` are those of the links; processes share them if there are fewer."""

    num_workers: int
    num_gateways: int
    addresses: tuple[str, ...]
    load_report_s: float
    heartbeat_s: float


@dataclass(slots=True)
class _Process:
    """A simulated process. A worker has running requests, and requests accepted since its last report."""

    peer: Peer
    role: Role
    link: int
    asks: bytes  # its Hello, to any incarnation
    heartbeat: bytes = b""
    head: bytes = b""  # empty until the coordinator has answered
    follows: bool = False
    heard_s: float = 0.0  # when the coordinator last sent it a frame
    num_running: int = 0
    num_reports: int = 0
    accepted: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Window:
    """The measured requests: those due from ``begin_s`` until ``end_s``, with their latencies since they were due."""

    rate: float
    begin_s: float
    end_s: float
    num_asked: int = 0
    num_refused: int = 0
    latencies_s: list[float] = field(default_factory=list)

    @property
    def is_answered(self) -> bool:
        return self.num_refused + len(self.latencies_s) == self.num_asked


class _Beat:
    """One event for each of ``num`` processes in every period, evenly spread."""

    def __init__(self, num: int, period_s: float) -> None:
        self._num, self._step_s = num, period_s / num
        self._next = 0
        self._began_s = 0.0

    def start(self, now: float) -> None:
        self._began_s, self._next = now, 0

    @property
    def due_s(self) -> float:
        return self._began_s + self._next * self._step_s

    def take(self) -> int:
        self._next += 1
        return (self._next - 1) % self._num


class SimulatedCluster:
    """The workers and gateways of one coordinator."""

    def __init__(self, shape: Shape, incarnation: int, now: float, seed: int = 0) -> None:
        self.num_met = 0
        self._shape = shape
        self._reader = HeadReader()
        self._random = random.Random(seed)
        names = [(f"worker-{number}", Role.WORKER) for number in range(shape.num_workers)]
        names += [(f"gateway-{number}", Role.GATEWAY) for number in range(shape.num_gateways)]
        self._processes = [
            self._process(Peer(name, incarnation), role, number % len(shape.addresses))
            for number, (name, role) in enumerate(names)
        ]
        self._by_name = {process.peer.name: process for process in self._processes}
        self._reports = _Beat(shape.num_workers, shape.load_report_s)
        self._heartbeats = _Beat(len(self._processes), shape.heartbeat_s)
        for beat in (self._reports, self._heartbeats):
            beat.start(now)
        self._answers: list[Outgoing] = []
        self._waiting_to_meet = deque(self._processes)
        self._asked_s: dict[str, float] = {}  # when each unanswered process last said hello
        self._window: Window | None = None
        self._num_requests = 0
        self._next_request_s = 0.0
        self._due_s: dict[str, float] = {}  # when each open request was due
        self._running: deque[tuple[float, _Process]] = deque()  # in the order of their ends

    @property
    def num_processes(self) -> int:
        return len(self._processes)

    def num_lost(self, now: float, after_s: float) -> int:
        """How many processes have heard nothing for ``after_s``, because the coordinator has declared them dead.

        A process that was declared dead does not come back.
        """
        return sum(now - process.heard_s > after_s for process in self._processes)

    def load(self, window: Window, now: float) -> None:
        """Send requests from now until the window's end, at its rate."""
        self._window = window
        self._due_s.clear()
        self._next_request_s = now + self._random.expovariate(window.rate)

    def due(self, now: float) -> list[Outgoing]:
        """All frames that are due by now."""
        frames, self._answers = self._answers, []
        if self.num_met < self.num_processes:
            frames += self._hellos(now)
        while self._running and self._running[0][0] <= now:
            self._running.popleft()[1].num_running -= 1
        while self._reports.due_s <= now:
            worker = self._processes[self._reports.take()]
            if worker.follows:
                frames.append(self._report(worker))
        while self._heartbeats.due_s <= now:
            process = self._processes[self._heartbeats.take()]
            if process.head:
                frames.append((process.link, process.heartbeat))
        window = self._window
        if window is not None:
            while self._next_request_s <= min(now, window.end_s):
                frames.append(self._place(window))
        return frames

    def take(self, frame: bytes, now: float) -> None:
        """Handle a frame from the coordinator. Only the few kinds of messages that matter are decoded."""
        sender, target, body_at = self._reader.read(frame)
        self._by_name[target.name].heard_s = now
        tag = frame[body_at + 1] if frame[body_at] in _FIXARRAY else 0
        if tag == _PLACED:
            fields: list[Any] = msgpack.unpackb(memoryview(frame)[body_at:])
            self._on_placed(fields[1], fields[3][0], now)
        elif tag == _REFUSED:
            due_s = self._due_s.pop(msgpack.unpackb(memoryview(frame)[body_at:])[1], None)
            if self._window is not None and due_s is not None and self._window.begin_s <= due_s:
                self._window.num_refused += 1
        elif tag == _SERVING:
            self._on_serving(sender, target, decode(frame[body_at:]))
        elif tag == _HELLO:
            self._on_hello(sender, target, decode(frame[body_at:]))

    def _hellos(self, now: float) -> list[Outgoing]:
        while self._waiting_to_meet and len(self._asked_s) < _ASKING_AT_ONCE:
            self._asked_s[self._waiting_to_meet.popleft().peer.name] = -_ASK_AGAIN_S
        unanswered = [name for name, asked_s in self._asked_s.items() if now >= asked_s + _ASK_AGAIN_S]
        for name in unanswered:
            self._asked_s[name] = now
        return [(process.link, process.asks) for process in map(self._by_name.__getitem__, unanswered)]

    def _process(self, peer: Peer, role: Role, link: int) -> _Process:
        worker = WorkerInfo("kind", _MODEL, _SPEED) if role is Role.WORKER else None
        hello = Hello(PROTOCOL_VERSION, role, self._shape.addresses[link], worker)
        return _Process(peer, role, link, make_head(peer, Peer(COORDINATOR_NAME, ANY_INCARNATION)) + encode(hello))

    def _on_hello(self, coordinator: Peer, target: Peer, hello: Message) -> None:
        process = self._by_name[target.name]
        if type(hello) is Hello and hello.answers == process.peer.incarnation and not process.head:
            self._asked_s.pop(target.name, None)
            process.head = make_head(process.peer, coordinator)
            process.heartbeat = process.head + encode(Heartbeat())
            self._answers.append((process.link, process.head + encode(Following(0, None, False))))

    def _on_serving(self, coordinator: Peer, target: Peer, serving: Message) -> None:
        process = self._by_name[target.name]
        if type(serving) is Serving and serving.answer:
            self.num_met += not process.follows
            process.follows = True
            following = Following(serving.term, coordinator, True)
            self._answers.append((process.link, process.head + encode(following)))

    def _place(self, window: Window) -> Outgoing:
        due_s = self._next_request_s
        self._next_request_s += self._random.expovariate(window.rate)
        self._num_requests += 1
        gateway = self._processes[self._shape.num_workers + self._num_requests % self._shape.num_gateways]
        request_id = f"cmpl-0123456789abcdef-{self._num_requests}"
        self._due_s[request_id] = due_s
        window.num_asked += window.begin_s <= due_s
        place = Place(request_id, 1, self._random.randint(_MIN_TOKENS, _MAX_TOKENS))
        return gateway.link, gateway.head + encode(place)

    def _on_placed(self, request_id: str, name: str, now: float) -> None:
        due_s = self._due_s.pop(request_id, None)
        worker = self._by_name[name]
        worker.accepted.append(request_id)
        worker.num_running += 1
        self._running.append((now + RUNNING_S, worker))
        if self._window is not None and due_s is not None and self._window.begin_s <= due_s:
            self._window.latencies_s.append(now - due_s)

    def _report(self, worker: _Process) -> Outgoing:
        worker.num_reports += 1
        used_bytes = worker.num_running * _BLOCKS_PER_REQUEST * _BYTES_PER_BLOCK
        report = LoadReport(
            sequence=worker.num_reports,
            num_running=worker.num_running,
            num_waiting=0,
            kv_total_bytes=_NUM_BLOCKS * _BYTES_PER_BLOCK,
            kv_used_bytes=used_bytes,
            virtual_usage_bytes=used_bytes,
            bytes_per_block=_BYTES_PER_BLOCK,
            tokens_per_block=_TOKENS_PER_BLOCK,
            num_preemptions=0,
            accepted=tuple(worker.accepted),
            kv_needed_bytes=used_bytes,
        )
        worker.accepted.clear()
        return worker.link, worker.head + encode(report)
