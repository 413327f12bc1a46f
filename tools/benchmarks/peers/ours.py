"""Our engine as a peer. Options: ``model``, ``dtype``."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from actorserve.core.messages import RequestSpec, SamplingParams, StepPlan
from actorserve.errors import ActorserveError
from actorserve.model_files.describe import describe
from actorserve.model_files.locate import locate
from tools.benchmarks.peers.protocol import CHUNK_TOKENS, BlockBudget, serve
from workers.engine_options import EngineOptions
from workers.engines.torch_engine import TorchEngine
from workers.kv.cache import bytes_per_token

_FIRST_TOKEN = 100  # any ordinary token ids will do
_TOKENS_PER_BLOCK = 16


class OurPeer:
    """Implements ``protocol.Scorer``. Each request and the prompt have blocks of their own."""

    def __init__(self, model: str, dtype: str, budget: BlockBudget) -> None:
        path = Path(model) if model != "default" else locate(model)
        description = describe(path)
        self._budget = budget
        self._request_rows = _rows(budget.context_tokens + budget.max_steps)
        num_rows = self._request_rows * budget.max_batch + _rows(budget.max_prompt_tokens)
        self.engine = TorchEngine(
            description,
            EngineOptions(
                device="cpu",
                dtype=dtype,
                num_threads=budget.num_threads,
                tokens_per_block=_TOKENS_PER_BLOCK,
                kv_cache_bytes=bytes_per_token(description.config, torch.float32) * num_rows * _TOKENS_PER_BLOCK,
            ),
        )
        for number in range(budget.max_batch):
            self._add(f"r{number}", budget.context_tokens)
        self._add("prompt", max(budget.max_prompt_tokens, 1))
        for number in range(budget.max_batch):
            self._prefill(f"r{number}", self._table(number, budget.context_tokens), budget.context_tokens)

    def prefill(self, num_tokens: int) -> float:
        table = self._table(self._budget.max_batch, num_tokens)
        began = time.perf_counter()
        self._prefill("prompt", table, num_tokens)
        return time.perf_counter() - began

    def decode(self, batch: int, steps: int) -> float:
        plans = [self.decode_plan(batch, step) for step in range(steps)]
        began = time.perf_counter()
        for plan in plans:
            self.engine.begin(plan).result()
        return time.perf_counter() - began

    def score(self, token_ids: Sequence[int]) -> float:
        logits = self.engine.prompt_logits(tuple(token_ids[:-1])).double()
        chosen = logits.log_softmax(dim=-1).gather(1, torch.tensor(token_ids[1:])[:, None])
        return -float(chosen.sum())

    def decode_plan(self, batch: int, step: int) -> StepPlan:
        """One token of each of ``batch`` requests, ``step`` tokens after their context."""
        position = self._budget.context_tokens + step
        return StepPlan(
            step_id=step,
            request_ids=tuple(f"r{number}" for number in range(batch)),
            starts=(position,) * batch,
            token_ids=tuple((_FIRST_TOKEN + number,) for number in range(batch)),
            block_tables=tuple(self._table(number, position + 1) for number in range(batch)),
            samples=(True,) * batch,
        )

    def _add(self, request_id: str, num_prompt_tokens: int) -> None:
        sampling = SamplingParams(seed=0, max_tokens=100_000, temperature=0.0)
        self.engine.add(RequestSpec(request_id, (_FIRST_TOKEN,) * num_prompt_tokens, sampling))

    def _table(self, number: int, num_tokens: int) -> tuple[int, ...]:
        """The blocks of so many tokens of the request ``number``, which gives none of them up; the prompt's is last."""
        num_groups, first_row = self.engine.layer_groups.num_groups, number * self._request_rows
        return tuple(range(first_row * num_groups, (first_row + _rows(num_tokens)) * num_groups))

    def _prefill(self, request_id: str, table: tuple[int, ...], num_tokens: int) -> None:
        for start in range(0, num_tokens, CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, num_tokens)
            self.engine.begin(
                StepPlan(
                    step_id=start,
                    request_ids=(request_id,),
                    starts=(start,),
                    token_ids=(tuple(range(_FIRST_TOKEN + start, _FIRST_TOKEN + end)),),
                    block_tables=(table[: _rows(end) * self.engine.layer_groups.num_groups],),
                    samples=(end == num_tokens,),
                )
            ).result()


def _rows(num_tokens: int) -> int:
    return -(-num_tokens // _TOKENS_PER_BLOCK)


def _make(options: dict[str, Any], budget: BlockBudget) -> OurPeer:
    return OurPeer(options["model"], options["dtype"], budget)


if __name__ == "__main__":
    sys.exit(serve(_make, (ActorserveError,)))
