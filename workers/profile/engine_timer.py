"""Times single iterations and copies of an engine that serves no requests.

Contexts are read from blocks with real KV, and each request of a batch reads different blocks as far as the pool
suffices. So caches help no more than they do in serving.
"""

import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from actorserve.core.messages import RequestSpec, SamplingParams, StepPlan
from actorserve.core.timing.profile import Link
from actorserve.profile_files import BYTES_PER_S_BOUNDS
from workers.engine import Engine

_FIRST_TOKEN = 100  # any ordinary token ids will do
_RING_BYTES = 128 * 2**20  # of KV over which contexts are spread: more than caches hold
_COMPUTED_RING_TOKENS = 512  # computed; the rest of the ring are copies
_COPY_BYTES = 32 * 2**20  # of a long copy
_NUM_COPIES = 5


class Shape(NamedTuple):
    """One iteration: a prefill chunk of ``num_tokens`` with ``num_before`` tokens before it (none, if 0), and a decode
    of ``num_requests`` requests with ``num_context_tokens`` each. Contexts are whole blocks.
    """

    num_tokens: int
    num_before: int
    num_requests: int
    num_context_tokens: int

    @property
    def num_all_context_tokens(self) -> int:
        """The number of tokens that all decodes attend to."""
        return self.num_requests * self.num_context_tokens


class EngineTimer:
    """Runs iterations and copies. A context manager: at its end the engine drops the requests.

    Contexts consist of rows, with a block of each layer group: row r has the blocks from r * groups on.
    If the pool is too small for a shape, requests share blocks, which does not change the time of an iteration.
    """

    def __init__(self, engine: Engine, shapes: Sequence[Shape]) -> None:
        """Prepare requests and contexts for these shapes. This overwrites the pool."""
        self._engine = engine
        self._num_groups = engine.layer_groups.num_groups
        self._num_rows = engine.num_blocks // self._num_groups
        self._num_host_rows = engine.num_host_blocks // self._num_groups
        self._num_steps = 0
        max_requests = max(1, *(shape.num_requests for shape in shapes))
        max_chunk_tokens = max(1, *(shape.num_tokens for shape in shapes))
        contexts = [tokens for shape in shapes for tokens in (shape.num_before, shape.num_all_context_tokens)]
        sampling = SamplingParams(seed=0, max_tokens=2**30)
        self._request_ids = tuple(f"timed-{number}" for number in range(max_requests + 1))
        for request_id in self._request_ids:
            engine.add(RequestSpec(request_id, (0,), sampling))
        # First a row for each decode's new token, then those of a prefill's chunk, then the ring of contexts.
        self._chunk_start = max_requests
        self._ring_start = max_requests + self._rows_of(max_chunk_tokens)
        wanted = min(self._rows_of(max(contexts)), _RING_BYTES // (engine.bytes_per_block * self._num_groups))
        self._ring_rows = max(1, min(wanted, self._num_rows - self._ring_start))
        if not wanted:  # the engine is too small for any context
            return
        computed = min(self._ring_rows, max(1, _COMPUTED_RING_TOKENS // engine.tokens_per_block))
        self._compute_ring(computed, max_chunk_tokens)
        if self._num_host_rows:
            self._copy_ring(computed)
        else:
            self._ring_rows = computed

    def iteration_s(self, shape: Shape) -> float:
        """Run one iteration; return its seconds."""
        rows = [self._decode(number, shape.num_context_tokens) for number in range(shape.num_requests)]
        if shape.num_tokens:
            rows.append(self._chunk(shape.num_tokens, shape.num_before))
        return self._step(rows)

    def swap_link(self) -> Link:
        """Copies of one block and of many, to the host and back; the engine must have host blocks."""
        engine = self._engine
        most = max(1, min(engine.num_host_blocks, engine.num_blocks, _COPY_BYTES // engine.bytes_per_block))

        def copy_s(num_blocks: int) -> float:
            blocks = tuple(range(num_blocks))
            began = time.perf_counter()
            engine.copy_out(blocks, blocks)
            engine.copy_in(blocks, blocks)
            return (time.perf_counter() - began) / 2

        return fit_link(copy_s, 1, most, engine.bytes_per_block)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for request_id in self._request_ids:
            self._engine.drop(request_id)

    def _rows_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._engine.tokens_per_block)

    def _context(self, number: int, num_tokens: int) -> list[int]:
        """The rows of a whole number of rows of context, for the request of this number."""
        num_rows = num_tokens // self._engine.tokens_per_block
        return [self._ring_start + (number * num_rows + place) % self._ring_rows for place in range(num_rows)]

    def _chunk(self, num_tokens: int, num_context_tokens: int) -> tuple[str, int, int, list[int]]:
        context = self._context(0, num_context_tokens)
        own = list(range(self._chunk_start, self._chunk_start + self._rows_of(num_tokens)))
        return self._request_ids[-1], len(context), num_tokens, context + own

    def _decode(self, number: int, num_context_tokens: int) -> tuple[str, int, int, list[int]]:
        context = self._context(number, num_context_tokens)
        return self._request_ids[number], len(context), 1, [*context, number]

    def _step(self, rows: list[tuple[str, int, int, list[int]]]) -> float:
        """Each of ``rows``: request, rows of context, new tokens, all rows."""
        self._num_steps += 1
        engine = self._engine
        vocabulary = engine.model.vocab_size
        plan = StepPlan(
            step_id=self._num_steps,
            request_ids=tuple(request_id for request_id, _, _, _ in rows),
            starts=tuple(num_context * engine.tokens_per_block for _, num_context, _, _ in rows),
            token_ids=tuple(
                tuple((_FIRST_TOKEN + row + place) % vocabulary for place in range(num_tokens))
                for row, (_, _, num_tokens, _) in enumerate(rows)
            ),
            block_tables=tuple(tuple(self._blocks(table)) for _, _, _, table in rows),
            samples=(True,) * len(rows),
        )
        return engine.begin(plan).result().duration_s

    def _blocks(self, rows: Iterable[int]) -> list[int]:
        """The blocks of these rows, of which the pool may have fewer."""
        size = self._num_groups
        return [row % self._num_rows * size + group for row in rows for group in range(size)]

    def _compute_ring(self, num_rows: int, max_chunk_tokens: int) -> None:
        """Compute the ring's KV. Each chunk is a prompt of its own, so that no position exceeds the model's."""
        chunk_rows = max(1, max_chunk_tokens // self._engine.tokens_per_block)
        for start in range(0, num_rows, chunk_rows):
            table = list(range(self._ring_start + start, self._ring_start + min(num_rows, start + chunk_rows)))
            self._step([(self._request_ids[-1], 0, len(table) * self._engine.tokens_per_block, table)])

    def _copy_ring(self, num_computed: int) -> None:
        engine = self._engine
        ring = range(self._ring_start, self._ring_start + self._ring_rows)
        count = min(num_computed, self._num_host_rows)
        out = self._blocks(ring[:count])
        engine.copy_out(out, range(len(out)))
        for start in range(num_computed, len(ring), count):
            into = self._blocks(ring[start : start + count])
            engine.copy_in(range(len(into)), into)


def memory_link() -> Link:
    """Copies within this host's memory: what swapping would take if the engine has no pool to swap to."""
    source, target = memoryview(bytearray(_COPY_BYTES)), memoryview(bytearray(_COPY_BYTES))

    def copy_s(num_bytes: int) -> float:
        began = time.perf_counter()
        target[:num_bytes] = source[:num_bytes]
        return time.perf_counter() - began

    return fit_link(copy_s, 4096, _COPY_BYTES, 1)


def loopback_link() -> Link:
    """Bytes through a local socket: the cost of moving KV to another worker of this host."""
    data = bytearray(_COPY_BYTES)
    received = memoryview(bytearray(_COPY_BYTES))
    here, there = socket.socketpair()

    def echo() -> None:
        with there:
            while header := there.recv(8, socket.MSG_WAITALL):
                _receive(there, received[: int.from_bytes(header, "little")])
                there.sendall(b"k")

    def send_s(num_bytes: int) -> float:
        began = time.perf_counter()
        here.sendall(num_bytes.to_bytes(8, "little"))
        here.sendall(memoryview(data)[:num_bytes])
        here.recv(1)
        return time.perf_counter() - began

    thread = threading.Thread(target=echo, name="loopback", daemon=True)
    thread.start()
    with here:
        link = fit_link(send_s, 1, _COPY_BYTES, 1)
    thread.join()
    return link


def _receive(source: socket.socket, into: memoryview) -> None:
    while into:
        into = into[source.recv_into(into) :]


def fit_link(copy_s: Callable[[int], float], least: int, most: int, bytes_per_unit: int) -> Link:
    """The line through the times of a short copy and a long one.

    Its rate stays within what a profile may hold, because two equal times would otherwise make it infinite.
    """
    times = {}
    for amount in {least, most}:
        copy_s(amount)  # warm up: memory becomes resident
        times[amount] = statistics.median(copy_s(amount) for _ in range(_NUM_COPIES))
    long_s = max(times[most], 1e-9)
    short_s = min(times[least], long_s)
    if most > least and long_s > short_s:
        bytes_per_s = (most - least) * bytes_per_unit / (long_s - short_s)
    else:
        bytes_per_s = most * bytes_per_unit / long_s
    bytes_per_s = min(max(bytes_per_s, BYTES_PER_S_BOUNDS[0]), BYTES_PER_S_BOUNDS[1])
    return Link(max(0.0, short_s - least * bytes_per_unit / bytes_per_s), bytes_per_s)
