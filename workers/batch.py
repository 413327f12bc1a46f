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

    On the device, integers: ``token_ids``, ``positions`` (absolute) and ``slots`` (where a token's KV is stored; none
    if negative), [T]; ``sample_rows``, the tokens whose logits are sampled; ``query_starts`` [R + 1]; ``context_lens``
    [R], tokens up to and including this chunk; ``block_tables`` [R, max_blocks], in which only a request's own blocks
    are set. The last three are int32. ``plan`` and the ``host_`` fields are on the host.
    """

    plan: StepPlan
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    sample_rows: Tensor
    tokens_per_block: int
    host_query_lens: IntArray
    host_context_lens: IntArray

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_requests(self) -> int:
        return len(self.host_query_lens)

    @property
    def fresh_blocks(self) -> list[int]:
        """The blocks that get their first token in this step."""
        size = self.tokens_per_block
        return [
            block
            for start, end, table in zip(self.plan.starts, self.host_context_lens, self.plan.block_tables, strict=True)
            for block in table[-(-start // size) : -(-int(end) // size)]
        ]

    @property
    def host_block_tables(self) -> npt.NDArray[np.int32]:
        """The block tables, [R, max_blocks], padded with zeros."""
        return _padded(self.plan.block_tables)


@dataclass(frozen=True, slots=True, eq=False)
class HostBatch:
    """The numbers of a batch on the host, int64: R requests, T tokens. The fields are those of `Batch`."""

    token_ids: IntArray
    positions: IntArray
    slots: IntArray
    query_starts: IntArray
    query_lens: IntArray
    context_lens: IntArray
    sample_rows: IntArray


def host_batch(plan: StepPlan, tokens_per_block: int) -> HostBatch:
    """Raises: ValueError if a request has no token in the plan, or too few blocks for its tokens."""
    starts = np.array(plan.starts, np.int64)
    query_lens = _lengths(plan.token_ids)
    context_lens = starts + query_lens
    if not query_lens.all() or (_lengths(plan.block_tables) * tokens_per_block < context_lens).any():
        raise ValueError(f"step {plan.step_id}: a request without tokens, or with too few blocks for them")
    query_starts = np.zeros(len(starts) + 1, np.int64)
    query_lens.cumsum(out=query_starts[1:])
    num_tokens = int(query_starts[-1])
    rows = np.arange(len(starts)).repeat(query_lens)
    positions = np.arange(num_tokens) + (starts - query_starts[:-1])[rows]

    # Of each table only the blocks that this step writes are read, because tables of long contexts are long.
    first_numbers, last_numbers = starts // tokens_per_block, (context_lens - 1) // tokens_per_block
    written = [
        table[first : last + 1]
        for table, first, last in zip(plan.block_tables, first_numbers.tolist(), last_numbers.tolist(), strict=True)
    ]
    counts = last_numbers - first_numbers + 1
    blocks = np.fromiter(chain.from_iterable(written), np.int64, int(counts.sum()))
    numbers, offsets = np.divmod(positions, tokens_per_block)
    places = (counts.cumsum() - counts - first_numbers)[rows] + numbers
    return HostBatch(
        token_ids=np.fromiter(chain.from_iterable(plan.token_ids), np.int64, num_tokens),
        positions=positions,
        slots=blocks[places] * tokens_per_block + offsets,
        query_starts=query_starts,
        query_lens=query_lens,
        context_lens=context_lens,
        sample_rows=query_starts[1:][np.array(plan.samples, bool)] - 1,
    )


def make_batch(plan: StepPlan, tokens_per_block: int, device: torch.device) -> Batch:
    """The plan's tensors, each copied by itself. Raises: ValueError as `host_batch`."""
    host = host_batch(plan, tokens_per_block)

    def put(array: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if device.type == "cpu" else tensor.to(device)

    return Batch(
        plan=plan,
        token_ids=put(host.token_ids),
        positions=put(host.positions),
        slots=put(host.slots),
        query_starts=put(host.query_starts.astype(np.int32)),
        context_lens=put(host.context_lens.astype(np.int32)),
        block_tables=put(_padded(plan.block_tables)),
        sample_rows=put(host.sample_rows),
        tokens_per_block=tokens_per_block,
        host_query_lens=host.query_lens,
        host_context_lens=host.context_lens,
    )


def _padded(tables: tuple[tuple[int, ...], ...]) -> npt.NDArray[np.int32]:
    lengths = _lengths(tables)
    padded = np.zeros((len(tables), int(lengths.max(initial=0))), np.int32)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.fromiter(
        chain.from_iterable(tables), np.int32, int(lengths.sum())
    )
    return padded


def _lengths(column: tuple[tuple[int, ...], ...]) -> IntArray:
    return np.fromiter(map(len, column), np.int64, len(column))
