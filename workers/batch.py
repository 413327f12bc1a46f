"""A step's plan as tensors, made once per step with numpy and read by every layer."""

from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actorserve.core.messages import StepPlan

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """T tokens of R requests, one request after another.

    On the device, int64: ``token_ids``, ``positions`` (absolute) and ``slots`` (where a token's KV is stored), [T];
    ``sample_rows``, the tokens whose logits are sampled; ``fresh_blocks``, the blocks that get their first token in
    this step. On the device, int32: ``query_starts`` [R + 1]; ``context_lens`` [R], tokens up to and including this
    chunk; ``block_tables`` [R, max_blocks], padded with zeros. The ``host_`` fields are numpy arrays, which attention
    plans with.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    sample_rows: Tensor
    fresh_blocks: Tensor
    tokens_per_block: int
    host_query_lens: IntArray
    host_context_lens: IntArray
    host_block_tables: npt.NDArray[np.int32]

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_requests(self) -> int:
        return len(self.host_query_lens)


def make_batch(plan: StepPlan, tokens_per_block: int, device: torch.device) -> Batch:
    """Raises: ValueError if a request has no token in the plan, or too few blocks for its tokens."""
    starts = np.array(plan.starts, np.int64)
    query_lens = _lengths(plan.token_ids)
    num_blocks = _lengths(plan.block_tables)
    context_lens = starts + query_lens
    if not query_lens.all() or (num_blocks * tokens_per_block < context_lens).any():
        raise ValueError(f"step {plan.step_id}: a request without tokens, or with too few blocks for them")
    query_starts = np.zeros(len(starts) + 1, np.int64)
    query_lens.cumsum(out=query_starts[1:])
    num_tokens = int(query_starts[-1])

    token_ids = np.fromiter(chain.from_iterable(plan.token_ids), np.int64, num_tokens)
    rows = np.arange(len(starts)).repeat(query_lens)
    positions = np.arange(num_tokens) + (starts - query_starts[:-1])[rows]
    tables = np.zeros((len(starts), int(num_blocks.max(initial=0))), np.int32)
    tables[np.arange(tables.shape[1]) < num_blocks[:, None]] = np.fromiter(
        chain.from_iterable(plan.block_tables), np.int32, int(num_blocks.sum())
    )
    numbers, offsets = np.divmod(positions, tokens_per_block)
    blocks = tables[rows, numbers].astype(np.int64)

    def put(array: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if device.type == "cpu" else tensor.to(device)

    return Batch(
        token_ids=put(token_ids),
        positions=put(positions),
        slots=put(blocks * tokens_per_block + offsets),
        query_starts=put(query_starts.astype(np.int32)),
        context_lens=put(context_lens.astype(np.int32)),
        block_tables=put(tables),
        sample_rows=put(query_starts[1:][np.array(plan.samples, bool)] - 1),
        fresh_blocks=put(blocks[offsets == 0]),
        tokens_per_block=tokens_per_block,
        host_query_lens=query_lens,
        host_context_lens=context_lens,
        host_block_tables=tables,
    )


def _lengths(column: tuple[tuple[int, ...], ...]) -> IntArray:
    return np.fromiter(map(len, column), np.int64, len(column))
