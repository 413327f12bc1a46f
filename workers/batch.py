"""A step's plan as tensors, made once per step with numpy and read by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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

    ``slots`` and ``block_tables`` are those of one layer group. With several groups (``core.kv.layer_groups``) the
    batch is that of group 0, and ``of_group`` has one for each, which differ in nothing else.
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
    group: int = 0
    num_groups: int = 1
    other_groups: tuple["Batch", ...] = ()

    @property
    def of_group(self) -> tuple["Batch", ...]:
        """The batch of each layer group."""
        return (self, *self.other_groups)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_requests(self) -> int:
        return len(self.host_query_lens)

    @property
    def fresh_blocks(self) -> list[int]:
        """The blocks of all groups that get their first token in this step."""
        size, groups = self.tokens_per_block, self.num_groups
        return [
            block
            for start, end, table in zip(self.plan.starts, self.host_context_lens, self.plan.block_tables, strict=True)
            for block in table[-(-start // size) * groups : -(-int(end) // size) * groups]
        ]

    @property
    def host_block_tables(self) -> npt.NDArray[np.int32]:
        """The group's block tables, [R, max_blocks], padded with zeros."""
        return _padded(self.plan.block_tables)[:, self.group :: self.num_groups]


@dataclass(frozen=True, slots=True, eq=False)
class HostBatch:
    """The numbers of a batch on the host, int64: R requests, T tokens. The fields are those of `Batch`; ``slots`` are
    of each layer group, [groups, T].
    """

    token_ids: IntArray
    positions: IntArray
    slots: IntArray
    query_starts: IntArray
    query_lens: IntArray
    context_lens: IntArray
    sample_rows: IntArray


def host_batch(plan: StepPlan, tokens_per_block: int, num_groups: int = 1) -> HostBatch:
    """Raises: ValueError if a request has no token in the plan, or too few blocks for its tokens."""
    starts = np.array(plan.starts, np.int64)
    query_lens = _lengths(plan.token_ids)
    context_lens = starts + query_lens
    if not query_lens.all() or (_lengths(plan.block_tables) // num_groups * tokens_per_block < context_lens).any():
        raise ValueError(f"step {plan.step_id}: a request without tokens, or with too few blocks for them")
    query_starts = np.zeros(len(starts) + 1, np.int64)
    query_lens.cumsum(out=query_starts[1:])
    num_tokens = int(query_starts[-1])
    rows = np.arange(len(starts)).repeat(query_lens)
    positions = np.arange(num_tokens) + (starts - query_starts[:-1])[rows]

    # Of each table only the blocks that this step writes are read, because tables of long contexts are long.
    first_numbers, last_numbers = starts // tokens_per_block, (context_lens - 1) // tokens_per_block
    written = [
        table[first * num_groups : (last + 1) * num_groups]
        for table, first, last in zip(plan.block_tables, first_numbers.tolist(), last_numbers.tolist(), strict=True)
    ]
    counts = last_numbers - first_numbers + 1
    blocks = np.fromiter(chain.from_iterable(written), np.int64, int(counts.sum()) * num_groups)
    if (blocks < 0).any():
        raise ValueError(f"step {plan.step_id}: a request without blocks for the tokens that it feeds")
    numbers, offsets = np.divmod(positions, tokens_per_block)
    places = (counts.cumsum() - counts - first_numbers)[rows] + numbers
    return HostBatch(
        token_ids=np.fromiter(chain.from_iterable(plan.token_ids), np.int64, num_tokens),
        positions=positions,
        slots=np.take(blocks.reshape(-1, num_groups).T, places, axis=1) * tokens_per_block + offsets,
        query_starts=query_starts,
        query_lens=query_lens,
        context_lens=context_lens,
        sample_rows=query_starts[1:][np.array(plan.samples, bool)] - 1,
    )


def make_batch(plan: StepPlan, tokens_per_block: int, device: torch.device, num_groups: int = 1) -> Batch:
    """The plan's tensors, each copied by itself. Raises: ValueError as `host_batch`."""
    host = host_batch(plan, tokens_per_block, num_groups)
    tables = _padded(plan.block_tables)

    def put(array: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if device.type == "cpu" else tensor.to(device)

    batch = Batch(
        plan=plan,
        token_ids=put(host.token_ids),
        positions=put(host.positions),
        slots=put(host.slots[0]),
        query_starts=put(host.query_starts.astype(np.int32)),
        context_lens=put(host.context_lens.astype(np.int32)),
        block_tables=put(np.ascontiguousarray(tables[:, ::num_groups])),
        sample_rows=put(host.sample_rows),
        tokens_per_block=tokens_per_block,
        host_query_lens=host.query_lens,
        host_context_lens=host.context_lens,
        num_groups=num_groups,
    )
    groups = range(1, num_groups)
    return with_groups(
        batch,
        [put(host.slots[group]) for group in groups],
        [put(np.ascontiguousarray(tables[:, group::num_groups])) for group in groups],
    )


def with_groups(batch: Batch, slots: Sequence[Tensor], block_tables: Sequence[Tensor]) -> Batch:
    """The batch of group 0 with those of the other groups, which have these ``slots`` and ``block_tables``."""
    if not slots:
        return batch
    others = (
        replace(batch, group=group, slots=of_group, block_tables=tables)
        for group, (of_group, tables) in enumerate(zip(slots, block_tables, strict=True), 1)
    )
    return replace(batch, other_groups=tuple(others))


def _padded(tables: tuple[tuple[int, ...], ...]) -> npt.NDArray[np.int32]:
    """The tables as rows, padded with zeros. Where a group has no block (``NO_BLOCK``) they are 0 as well, because
    kernels may load what they give no weight.
    """
    lengths = _lengths(tables)
    padded = np.zeros((len(tables), int(lengths.max(initial=0))), np.int32)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.fromiter(
        chain.from_iterable(tables), np.int32, int(lengths.sum())
    )
    return np.maximum(padded, 0, out=padded)


def _lengths(column: tuple[tuple[int, ...], ...]) -> IntArray:
    return np.fromiter(map(len, column), np.int64, len(column))
