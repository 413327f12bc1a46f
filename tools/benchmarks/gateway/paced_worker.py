"""Workers that compute nothing: every step of a worker sends one token of each of its requests.

They are real actors on the real transport, in one process, and their steps are spread evenly over time. Run by
``tools/bench gateway``. ``argv[1]`` holds the ``Options`` as JSON. Each line of stdin is the seconds from one step of a
worker to its next, and the process ends when stdin ends.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import uvloop

from actorserve.actors.cluster_actor import ClusterActor
from actorserve.actors.node import open_node
from actorserve.cluster.network import LocalNetwork
from actorserve.core.effects import Effect, Send
from actorserve.core.messages import (
    LOCAL,
    PROTOCOL_VERSION,
    Finished,
    FinishReason,
    Hello,
    LoadReport,
    Message,
    ModelInfo,
    Peer,
    PeerDown,
    PeerUp,
    Release,
    Resend,
    Role,
    Start,
    Started,
    Tick,
    Tokens,
    WorkerInfo,
)
from actorserve.settings import ClusterSettings
from tools.benchmarks.gateway.step_clock import NUM_STEPS, StepClock

CONTEXT_TOKENS: Final = 8192
_KV_BYTES: Final = 2**40  # more than the requests need, so that none of them waits
_BYTES_PER_TOKEN: Final = 64


@dataclass(frozen=True, slots=True)
class Options:
    """``context_tokens`` is the model's context. ``clock_file`` belongs to a ``StepClock``."""

    num_workers: int
    runtime_dir: str
    model: str
    vocab_size: int
    step_token_ids: Sequence[int]
    clock_file: str
    step_s: float
    load_report_s: float
    heartbeat_s: float
    death_after_s: float
    context_tokens: int = CONTEXT_TOKENS


@dataclass(slots=True)
class _Running:
    """The requests of one gateway, as the columns of its next ``Tokens``."""

    request_ids: list[str] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    max_tokens: list[int] = field(default_factory=list)

    def add(self, start: Start) -> None:
        """Begin a request, or a new epoch of it. A start that is sent again changes nothing."""
        request_id = start.request.request_id
        if request_id in self.request_ids and self.epochs[self.request_ids.index(request_id)] >= start.epoch:
            return
        self.remove(request_id, start.epoch)
        self.request_ids.append(request_id)
        self.epochs.append(start.epoch)
        self.positions.append(len(start.request.output_token_ids))
        self.max_tokens.append(start.request.sampling.max_tokens)

    def remove(self, request_id: str, epoch: int) -> None:
        """Forget the request under this and any older epoch."""
        if request_id in self.request_ids and self.epochs[row := self.request_ids.index(request_id)] <= epoch:
            for column in (self.request_ids, self.epochs, self.positions, self.max_tokens):
                del column[row]

    def go_back(self, resend: Resend) -> None:
        """Continue with the first token that was lost."""
        if resend.request_id in self.request_ids:
            self.positions[self.request_ids.index(resend.request_id)] = resend.from_position

    def step(self, token_id: int) -> list[Message]:
        """The next token of every request, and the end of those that have all."""
        num = len(self.request_ids)
        tokens = Tokens(tuple(self.request_ids), tuple(self.epochs), tuple(self.positions), (token_id,) * num)
        self.positions = [position + 1 for position in self.positions]
        rows = zip(self.request_ids, self.epochs, self.positions, self.max_tokens, strict=True)
        ended = [
            Finished(request_id, epoch, FinishReason.LENGTH, position)
            for request_id, epoch, position, most in rows
            if position >= most
        ]
        for finished in ended:
            self.remove(finished.request_id, finished.epoch)
        return [tokens, *ended]


class PacedCore:
    """Worker number ``index``: accepts every request, and sends a token of each one in every step."""

    def __init__(self, options: Options, index: int, clock: StepClock) -> None:
        self._index, self._num_workers = index, options.num_workers
        self._step_s = options.step_s
        self._token_ids = options.step_token_ids
        self._report_s = options.load_report_s
        self._clock = clock
        self._gateways: dict[Peer, _Running] = {}
        self._listeners: list[Peer] = []
        self._accepted: list[str] = []
        self._num_steps = self._num_reports = 0
        self._next_step_s = self._next_report_s = 0.0

    def pace(self, step_s: float, now: float) -> None:
        """From now on a step takes ``step_s`` seconds."""
        self._step_s = step_s
        self._next_step_s = now + step_s * self._index / self._num_workers

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        sender = sender or LOCAL
        match message:
            case Tick():
                return [*self._step(now), *self._report(now)]
            case Start(epoch=epoch, request=request):
                self._gateways.setdefault(sender, _Running()).add(message)
                self._accepted.append(request.request_id)
                return [Send(sender, Started(request.request_id, epoch))]
            case Release(request_id=request_id, epoch=epoch) if sender in self._gateways:
                self._gateways[sender].remove(request_id, epoch)
            case Resend() if sender in self._gateways:
                self._gateways[sender].go_back(message)
            case PeerUp(peer=peer):
                self._listeners.append(peer)
            case PeerDown(peer=peer):
                self._listeners.remove(peer)
                self._gateways.pop(peer, None)
            case _:
                pass
        return []

    def next_deadline(self) -> float | None:
        return min(self._next_step_s, self._next_report_s)

    def _step(self, now: float) -> list[Effect]:
        if now < self._next_step_s:
            return []
        self._next_step_s = max(self._next_step_s + self._step_s, now)
        self._num_steps += 1
        number = self._num_steps * self._num_workers + self._index
        self._clock.note(number, time.monotonic())
        token_id = self._token_ids[number % NUM_STEPS]
        return [
            Send(peer, message)
            for peer, running in self._gateways.items()
            if running.request_ids
            for message in running.step(token_id)
        ]

    def _report(self, now: float) -> list[Effect]:
        if now < self._next_report_s:
            return []
        self._next_report_s = now + self._report_s
        self._num_reports += 1
        num_running = sum(len(running.request_ids) for running in self._gateways.values())
        used_bytes = num_running * 512 * _BYTES_PER_TOKEN
        report = LoadReport(
            self._num_reports,
            num_running,
            0,
            kv_total_bytes=_KV_BYTES,
            kv_used_bytes=used_bytes,
            virtual_usage_bytes=used_bytes,
            bytes_per_block=16 * _BYTES_PER_TOKEN,
            tokens_per_block=16,
            num_preemptions=0,
            accepted=tuple(self._accepted),
            kv_needed_bytes=used_bytes,
        )
        self._accepted.clear()
        return [Send(peer, report) for peer in self._listeners]


def _open(options: Options, core: PacedCore, index: int) -> ClusterActor:
    name, folder = f"worker-{index}", Path(options.runtime_dir)
    model = ModelInfo(options.model, options.vocab_size, options.context_tokens)
    hello = Hello(PROTOCOL_VERSION, Role.WORKER, worker=WorkerInfo("paced", model))
    settings = ClusterSettings(heartbeat_s=options.heartbeat_s, death_after_s=options.death_after_s)
    return ClusterActor(core, open_node(name, hello, settings, LocalNetwork(folder)))


async def _run(options: Options) -> None:
    clock = StepClock(Path(options.clock_file))
    cores = [PacedCore(options, index, clock) for index in range(options.num_workers)]
    actors = [_open(options, core, index) for index, core in enumerate(cores)]
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with asyncio.TaskGroup() as group:
        for actor in actors:
            group.create_task(actor.run())
        while line := await lines.readline():
            for core in cores:
                core.pace(float(line), loop.time())
        for actor in actors:
            actor.stop()


def main(arguments: Sequence[str]) -> int:
    uvloop.run(_run(Options(**json.loads(arguments[0]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
