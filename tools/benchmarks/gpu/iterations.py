"""An engine with random weights, and the iterations that it is measured with."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from actorserve.core.messages import RequestSpec, SamplingParams, StepPlan
from actorserve.errors import ActorserveError
from actorserve.model_files.describe import describe
from actorserve.model_files.description import ModelDescription
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.gpu.device import Device
from tools.benchmarks.gpu.shapes import write_shape
from workers.engine import PendingStep
from workers.engine_options import EngineOptions
from workers.engines.torch_engine import TorchEngine
from workers.kernels.numerics import Numerics, numerics
from workers.kv_transfer.cuda import CudaBlocks

_FIRST_TOKEN = 100  # any ordinary token ids will do
_PROMPT = "prompt"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The largest iteration, and the memory of the pools in bytes; None for what the device suggests."""

    max_requests: int
    max_tokens: int
    kv_bytes: int | None
    host_kv_bytes: int


class Measured:
    """An engine and its requests. Requests share KV blocks where the pool is too small for all of them, which changes
    no time while the pool is larger than the device's caches.
    """

    def __init__(self, shape: str, folder: Path, device: Device, dtype: str, num_threads: int, sizes: Sizes) -> None:
        """Make the engine, with weights of the shape's model. Raises: BenchError if it does not fit."""
        self.device = device
        self.description: ModelDescription = describe(write_shape(shape, folder), "dummy")
        try:
            self.mode: Numerics = numerics(dtype, device.torch)
            self.engine = TorchEngine(
                self.description,
                EngineOptions(
                    device=str(device.torch),
                    dtype=dtype,
                    num_threads=num_threads,
                    max_batch_requests=sizes.max_requests,
                    max_batch_tokens=sizes.max_tokens,
                    kv_cache_bytes=sizes.kv_bytes,
                    host_kv_bytes=sizes.host_kv_bytes,
                ),
            )
        except ActorserveError as error:
            raise BenchError(f"{shape}: {error}") from None
        pool = self.engine.kv.device
        if isinstance(pool, CudaBlocks):
            with torch.inference_mode():  # in which the engine made it
                pool.blocks.zero_()  # what the memory held before may not be numbers
        self._steps = itertools.count(1)
        sampling = SamplingParams(seed=0, max_tokens=2**30, temperature=0.0)
        for request_id in (*map(_name, range(sizes.max_requests)), _PROMPT):
            self.engine.add(RequestSpec(request_id, (0,), sampling))

    def fits(self, num_context_tokens: int) -> bool:
        """Whether one request may have such a context."""
        return num_context_tokens < self.engine.model.max_tokens

    def shares_blocks(self, num_requests: int, num_context_tokens: int) -> bool:
        """Whether the pool is too small for as many requests with such contexts."""
        return num_requests * self._blocks(num_context_tokens + 1) > self.engine.num_blocks

    def decode(self, num_requests: int, num_context_tokens: int) -> StepPlan:
        """One token of each of ``num_requests`` requests, with ``num_context_tokens`` tokens before it."""
        num_blocks = self._blocks(num_context_tokens + 1)
        return self._plan(
            tuple(map(_name, range(num_requests))),
            num_context_tokens,
            1,
            [self._table(number * num_blocks, num_blocks) for number in range(num_requests)],
        )

    def prefill(self, num_tokens: int) -> StepPlan:
        """A whole prompt in one iteration."""
        return self._plan((_PROMPT,), 0, num_tokens, [self._table(0, self._blocks(num_tokens))])

    def run(self, plan: StepPlan, num_steps: int = 1) -> None:
        """Run the plan so many times, and return when the last tokens are on the host.

        Each step is begun before the one before it has ended, as a worker does.
        """
        before: PendingStep | None = None
        for _ in range(num_steps):
            begun = self.engine.begin(replace(plan, step_id=next(self._steps)))
            if before is not None:
                before.result()
            before = begun
        if before is not None:
            before.result()

    def _plan(
        self, request_ids: tuple[str, ...], start: int, num_tokens: int, tables: Sequence[tuple[int, ...]]
    ) -> StepPlan:
        count, vocabulary = len(request_ids), self.engine.model.vocab_size
        return StepPlan(
            step_id=0,
            request_ids=request_ids,
            starts=(start,) * count,
            # Requests have different tokens, because equal ones would choose the same experts.
            token_ids=tuple(
                tuple((_FIRST_TOKEN + number + place) % vocabulary for place in range(num_tokens))
                for number in range(count)
            ),
            block_tables=tuple(tables),
            samples=(True,) * count,
        )

    def _table(self, first: int, num_blocks: int) -> tuple[int, ...]:
        return tuple((first + place) % self.engine.num_blocks for place in range(num_blocks))

    def _blocks(self, num_tokens: int) -> int:
        """The blocks of a request that gives none of them up, row by row (``core.kv.layer_groups``)."""
        return -(-num_tokens // self.engine.tokens_per_block) * self.engine.layer_groups.num_groups


def _name(number: int) -> str:
    return f"r{number}"
