"""A step's plan on a GPU by one copy: all numbers packed into one buffer, and block tables that are patched.

The device keeps a copy of each request's block table, and of a table only what changed travels. The device also keeps
the token that it sampled last for each request, so that the next step can be planned before the host has read it.
"""

import importlib
from collections import OrderedDict
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actorserve.core.messages import StepPlan
from workers.batch import Batch, HostBatch, host_batch, with_groups

Ints = npt.NDArray[np.int32]
Doubles = npt.NDArray[np.float64]

_NUM_STAGED = 2  # plans whose copies may wait for the device at once
_TILE_BLOCKS = 1024
_TILE_TOKENS = 128
_MAX_RULE_INTS = 16  # of a request, in the buffers; more give a plan buffers of its own
_ALIGNMENT = 4  # of a field, in int32
_NO_SLOT = -1
_PIECE = 256  # of a table, compared at once
NO_RULES: Doubles = np.empty((0, 0))


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The largest plan that the buffers have room for. A larger one gets buffers of its own."""

    max_requests: int
    max_tokens: int
    max_blocks: int
    """Of one request, in all layer groups."""
    num_groups: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """A batch on the device. ``unpack`` must run before any of its tensors is read, and before the next batch is made.

    ``sampled``: the table row of each request that samples, int32. ``rules``: the numbers that came with it for each of
    them, [S, fields] float64. Both are on the device.
    """

    batch: Batch
    sampled: Tensor
    rules: Tensor
    _block_tables: Tensor  # of all layer groups
    _unpack_fields: tuple[Tensor, ...]


@dataclass(slots=True)
class _Kept:
    """A request's row of the device's tables, and the blocks in it."""

    row: int
    table: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Field:
    """``numbers`` of a plan, and ``room`` for at least so many, so that what follows lies at the same address."""

    numbers: npt.NDArray[Any] | list[int]
    room: int = 0


class _Staging:
    """Pinned memory that one plan is written to, and whether the device has read the plan before."""

    def __init__(self, size: int, is_pinned: bool) -> None:
        self.buffer = torch.empty(size, dtype=torch.int32, pin_memory=is_pinned)
        self._was_read = torch.cuda.Event() if is_pinned else None  # type: ignore[no-untyped-call]

    def wait(self) -> Ints:
        """The memory, when the copy before is done."""
        if self._was_read is not None:
            self._was_read.synchronize()
        numbers: Ints = self.buffer.numpy()
        return numbers

    def copy_to(self, device: Tensor, count: int) -> None:
        device[:count].copy_(self.buffer[:count], non_blocking=True)
        if self._was_read is not None:
            self._was_read.record()


class PackedBatches:
    """Makes batches. One thread calls it, in the order of the steps; all device work is on the current stream.

    The tensors of a batch are views of buffers that the next batch uses, too. Work that was launched before the next
    call of ``make`` may read them.
    """

    def __init__(self, limits: PlanLimits, tokens_per_block: int, device: torch.device) -> None:
        """Raises: ImportError if Triton cannot be imported."""
        self._kernels: Any = importlib.import_module("workers.kernels.triton.plan_kernel")
        self._limits = limits
        self._tokens_per_block = tokens_per_block
        self._device = device
        rows = limits.max_requests + 1  # the last row is for padding
        self._kept_tables = torch.zeros((rows, limits.max_blocks), dtype=torch.int32, device=device)
        self._last_tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # the first was used longest ago
        self._free_rows = list(range(limits.max_requests))
        self._is_pinned = device.type == "cuda"
        size = (
            (2 + limits.num_groups) * _aligned(max(limits.max_tokens, limits.max_requests))
            + 8 * _aligned(rows)
            + _aligned(limits.max_requests * limits.max_blocks)
            + limits.max_requests * _MAX_RULE_INTS
        )
        self._packed = torch.empty(size, dtype=torch.int32, device=device)
        self._tables = torch.zeros(limits.max_requests * limits.max_blocks, dtype=torch.int32, device=device)
        self._staged = [_Staging(size, self._is_pinned) for _ in range(_NUM_STAGED)]
        self._next = 0

    def make(self, plan: StepPlan, num_rows: int | None = None, rules: Doubles = NO_RULES) -> PackedBatch:
        """The plan's batch, for which one copy is launched. ``rules``: [S, fields], of the S requests that sample.

        ``num_rows``: for a plan that feeds one token of each request, pad it to this many requests of one token, whose
        KV is stored nowhere. Then all tensors lie at the same addresses for the same ``num_rows``.

        Raises: ValueError if a request has no token in the plan, too few blocks for its tokens, or more blocks than
        the limit.
        """
        num_groups = self._limits.num_groups
        host = host_batch(plan, self._tokens_per_block, num_groups)
        if num_rows is not None:
            host = _padded(host, num_rows)
        num_requests = len(host.query_lens)
        rows, num_kept = self._keep_rows(plan)
        sampled = [row for row, samples in zip(rows, plan.samples, strict=True) if samples]
        padding = num_requests - len(rows)
        tables = [*plan.block_tables, *((0,) * num_groups,) * padding]
        num_kept += [0] * padding
        num_blocks = np.fromiter(map(len, tables), np.int64, num_requests)
        num_new = num_blocks - np.array(num_kept, np.int64)
        values = np.fromiter(
            chain.from_iterable(table[kept:] for table, kept in zip(tables, num_kept, strict=True)),
            np.int32,
            int(num_new.sum()),
        )
        fields = self._copy(
            _Field(host.token_ids),
            _Field(host.positions),
            *(_Field(of_group) for of_group in host.slots),
            _Field(host.query_starts),
            _Field(host.context_lens),
            _Field(rows + [self._limits.max_requests] * padding),
            _Field(num_blocks),
            _Field(num_kept),
            _Field(num_new.cumsum() - num_new),
            _Field(host.sample_rows, num_requests),
            _Field(sampled, num_requests),
            _Field(values),
            _Field(np.ascontiguousarray(rules).view(np.int32).ravel()),
        )
        token_ids, positions, *slots = fields[: 2 + num_groups]
        query_starts, context_lens, *of_tables = fields[2 + num_groups : 8 + num_groups]
        sample_rows, sampled_rows, new, packed_rules = fields[8 + num_groups :]
        width = int(num_blocks.max(initial=num_groups)) if num_rows is None else self._limits.max_blocks
        tables_size = num_requests * width
        table_memory = self._tables if tables_size <= len(self._tables) else self._tables.new_empty(tables_size)
        block_tables = table_memory[:tables_size].view(num_requests, width)
        batch = Batch(
            plan=plan,
            token_ids=token_ids,
            positions=positions,
            slots=slots[0],
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=block_tables[:, ::num_groups],
            sample_rows=sample_rows,
            tokens_per_block=self._tokens_per_block,
            host_query_lens=host.query_lens,
            host_context_lens=host.context_lens,
            num_groups=num_groups,
        )
        batch = with_groups(batch, slots[1:], [block_tables[:, group::num_groups] for group in range(1, num_groups)])
        rules_on_device = packed_rules.view(torch.float64).view(rules.shape)
        return PackedBatch(batch, sampled_rows, rules_on_device, block_tables, (*of_tables, new))

    def unpack(self, packed: PackedBatch) -> None:
        """Launch what completes the batch's block tables and tokens."""
        batch = packed.batch
        num_requests, width = packed._block_tables.shape
        if num_requests == 0:
            return
        self._kernels.unpack[(num_requests, -(-width // _TILE_BLOCKS))](
            batch.token_ids,
            batch.query_starts,
            *packed._unpack_fields,
            self._kept_tables,
            self._last_tokens,
            packed._block_tables,
            self._kept_tables.stride(0),
            width,
            tile_blocks=_TILE_BLOCKS,
            num_warps=4,
        )

    def keep_tokens(self, packed: PackedBatch, token_ids: Tensor) -> None:
        """Keep the tokens that the batch's requests sampled, [number of sampling requests], for a later plan that says
        ``NOT_YET``."""
        count = len(packed.sampled)
        if token_ids.shape != (count,):
            raise ValueError(f"{count} requests sampled, and there are {tuple(token_ids.shape)} tokens")
        if count:
            self._kernels.keep_tokens[(-(-count // _TILE_TOKENS),)](
                token_ids, packed.sampled, self._last_tokens, count, tile=_TILE_TOKENS, num_warps=4
            )

    def drop(self, request_id: str) -> None:
        """Forget a request's table and last token. Unknown ids are ignored."""
        kept = self._kept.pop(request_id, None)
        if kept is not None:
            self._free_rows.append(kept.row)

    def _keep_rows(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        """Each request's row, and how many of its first blocks the device has in it already."""
        if len(plan.request_ids) > self._limits.max_requests:
            raise ValueError(f"step {plan.step_id}: more than {self._limits.max_requests} requests")
        longest = max(map(len, plan.block_tables), default=0)
        if longest > self._limits.max_blocks:
            raise ValueError(f"step {plan.step_id}: a request with more than {self._limits.max_blocks} blocks")
        for request_id in plan.request_ids:
            if request_id in self._kept:
                self._kept.move_to_end(request_id)
        rows, num_kept = [], []
        for request_id, table in zip(plan.request_ids, plan.block_tables, strict=True):
            kept = self._kept.get(request_id)
            if kept is None:
                # If no row is free, the request that was not planned for the longest time gives up its row.
                row = self._free_rows.pop() if self._free_rows else self._kept.popitem(last=False)[1].row
                kept = self._kept[request_id] = _Kept(row, ())
            num_kept.append(_common_length(kept.table, table))
            kept.table = table
            rows.append(kept.row)
        return rows, num_kept

    def _copy(self, *fields: _Field) -> list[Tensor]:
        """The fields' numbers on the device, as int32, by one copy."""
        ends = np.cumsum([_aligned(max(field.room, len(field.numbers))) for field in fields]).tolist()
        starts = [0, *ends[:-1]]
        staged, packed = self._staged[self._next], self._packed
        self._next = (self._next + 1) % len(self._staged)
        if ends[-1] > len(packed):
            staged, packed = _Staging(ends[-1], self._is_pinned), self._packed.new_empty(ends[-1])
        memory = staged.wait()
        for start, field in zip(starts, fields, strict=True):
            memory[start : start + len(field.numbers)] = field.numbers
        staged.copy_to(packed, ends[-1])
        return [packed[start : start + len(field.numbers)] for start, field in zip(starts, fields, strict=True)]


def _padded(host: HostBatch, num_rows: int) -> HostBatch:
    missing = num_rows - len(host.query_lens)
    if missing < 0 or (host.query_lens != 1).any():
        raise ValueError(f"a batch of {len(host.query_lens)} requests cannot be padded to {num_rows} of one token")
    ones = np.ones(missing, np.int64)
    return HostBatch(
        token_ids=np.append(host.token_ids, 0 * ones),
        positions=np.append(host.positions, 0 * ones),
        slots=np.pad(host.slots, ((0, 0), (0, missing)), constant_values=_NO_SLOT),
        query_starts=np.arange(num_rows + 1),
        query_lens=np.append(host.query_lens, ones),
        context_lens=np.append(host.context_lens, ones),
        sample_rows=host.sample_rows,
    )


def _common_length(old: tuple[int, ...], new: tuple[int, ...]) -> int:
    """How many first numbers are equal. A table mostly stays or grows at its end."""
    shorter = min(len(old), len(new))
    if old is new or old[:shorter] == new[:shorter]:
        return shorter
    # Piece by piece, because a table of a model with windows changes where its window begins, which may be far behind.
    piece = next(at for at in range(0, shorter, _PIECE) if old[at : at + _PIECE] != new[at : at + _PIECE])
    return next(at for at in range(piece, shorter) if old[at] != new[at])


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
