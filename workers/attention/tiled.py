"""Attention in plain torch, on any device: fixed tiles of keys, fixed numbers of query rows, one order of summing.

Every request's context is cut into tiles of 64 keys at multiples of 64, for any block size. A batched GEMM computes
the tiles' scores, in float32. The maximum over a query's tiles is exact in any order. Each tile's weights and weighted
values are sums of a fixed shape, and tiles are added from the first to the last. Keys after the query get weight 0, so
trailing tiles add exactly nothing. Probing finds how many rows (queries x heads of a group) a GEMM may have without
changing bits, as for row tiles (``workers.kernels.tiles``).

Work is cut into units of neighbouring queries of one request. Units with the same number of rows are computed together:
tile 0 of all units, then tile 1 of the units that have one, and so on.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from workers.batch import Batch, IntArray

KEYS_PER_TILE = 64
_MAX_QUERIES_PER_UNIT = 64
_MAX_GROUP_SCORES = 2**21  # floats in one batched GEMM's result: stays in the cache
_PROBE_BATCHES = (1, 2, 3, 4, 5, 8, 13, 33, 64)

Matmul = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Unit:
    """Queries ``first_token``, ... of one request, at ``first_position``, ..., and the request's row in the batch."""

    request: int
    first_token: int
    first_position: int
    num_queries: int
    window: int | None

    @property
    def first_tile(self) -> int:
        return 0 if self.window is None else max(0, self.first_position - self.window + 1) // KEYS_PER_TILE

    @property
    def num_tiles(self) -> int:
        return -(-(self.first_position + self.num_queries) // KEYS_PER_TILE) - self.first_tile


@dataclass(frozen=True, slots=True)
class _Group:
    """Units computed together. U units of ``queries_per_unit`` queries and ``num_rows`` GEMM rows, N tiles in all."""

    queries_per_unit: int
    num_rows: int
    query_tokens: Tensor  # [U * queries_per_unit] rows of the query tensor; padding repeats the first row
    output_tokens: Tensor  # the same, but padding points behind the last token
    tile_units: Tensor  # [N] the unit that each tile belongs to
    units_per_step: tuple[int, ...]  # how many units have a first tile, a second, ...; longest units first
    gathered: Tensor  # [num_kv_heads * N * stretches a tile]: where the tiles' keys lie in the pool
    bias: Tensor  # [N, num_rows, KEYS_PER_TILE] 0 or -inf


class TiledAttention:
    """The backend for CPUs without native kernels, and for GPUs without Triton."""

    reads_whole_blocks = True
    keys_transposed = False

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device, scale: float) -> None:
        """``scale``: the factor of scores.

        Raises: ValueError if this machine's products depend on a row's place in a tile.
        """
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._heads_per_group = num_heads // num_kv_heads
        self._head_dim = head_dim
        self._device = device
        self._scale = scale
        queries = [2**n for n in range(int(math.log2(_MAX_QUERIES_PER_UNIT)) + 1)]
        candidates = sorted({n * self._heads_per_group for n in queries} | {2**n for n in range(9)})
        self._matmul, sizes = _probe(candidates, head_dim, device)
        self._rows_by_queries = {
            n: min(size for size in sizes if size >= n * self._heads_per_group)
            for n in queries
            if n * self._heads_per_group <= sizes[-1]
        }
        self._max_queries = max(self._rows_by_queries)
        batched = "batched" if self._matmul is torch.bmm else "single"
        self._name = f"tiled keys={KEYS_PER_TILE} rows={tuple(self._rows_by_queries.items())} {batched}"
        # Of the batch with these context lengths, by layer group and window.
        self._planned: tuple[IntArray, dict[tuple[int, int | None], list[_Group]]] | None = None

    @property
    def name(self) -> str:
        return self._name

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, batch: Batch, window: int | None = None) -> Tensor:
        if keys.shape != values.shape:
            raise ValueError(f"tiled attention takes keys in the values' layout: {keys.shape}, {values.shape}")
        if self._planned is None or self._planned[0] is not batch.host_context_lens:
            self._planned = batch.host_context_lens, {}
        groups = self._planned[1].get((batch.group, window))
        if groups is None:
            groups = self._planned[1][batch.group, window] = self._plan(batch, keys.shape[1], window)
        scaled = query.float() * self._scale
        output = torch.empty((len(query) + 1, self._num_heads * self._head_dim), device=query.device)
        stretch = math.gcd(batch.tokens_per_block, KEYS_PER_TILE) * self._head_dim
        for group in groups:
            result = self._attend(group, scaled, keys.view(-1, stretch), values.view(-1, stretch))
            output.index_copy_(0, group.output_tokens, result)
        return output[:-1].view(query.shape).to(query.dtype)

    def _attend(self, group: _Group, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[U * queries_per_unit, num_heads * head_dim] for a group."""
        kv_heads, heads, dim = self._num_kv_heads, self._heads_per_group, self._head_dim
        num_units, rows = group.units_per_step[0], group.queries_per_unit * heads
        q = query.index_select(0, group.query_tokens).view(num_units, group.queries_per_unit, kv_heads, heads, dim)
        q = q.permute(2, 0, 1, 3, 4).reshape(kv_heads, num_units, rows, dim)
        if group.num_rows > rows:
            q = F.pad(q, (0, 0, 0, group.num_rows - rows))
        q = q.index_select(1, group.tile_units).view(-1, group.num_rows, dim)
        k = keys.index_select(0, group.gathered).view(-1, KEYS_PER_TILE, dim).float()
        v = values.index_select(0, group.gathered).view(-1, KEYS_PER_TILE, dim).float()

        scores = self._matmul(q, k.mT).view(kv_heads, -1, group.num_rows, KEYS_PER_TILE).add_(group.bias)
        highest = _max_tiles(scores.amax(-1), group.units_per_step)
        weights = scores.sub_(highest.index_select(1, group.tile_units).unsqueeze(-1)).exp_()
        totals = _add_tiles(weights.sum(-1), group.units_per_step)
        weighted = self._matmul(weights.view(-1, group.num_rows, KEYS_PER_TILE), v)
        summed = _add_tiles(weighted.view(kv_heads, -1, group.num_rows, dim), group.units_per_step)
        result = (summed / totals.unsqueeze(-1))[:, :, :rows]
        result = result.reshape(kv_heads, num_units, group.queries_per_unit, heads, dim)
        return result.permute(1, 2, 0, 3, 4).reshape(-1, self._num_heads * dim)

    def _plan(self, batch: Batch, num_slots: int, window: int | None) -> list[_Group]:
        by_size: dict[int, list[_Unit]] = {}
        first_token = 0
        for request, (num_queries, context) in enumerate(
            zip(batch.host_query_lens.tolist(), batch.host_context_lens.tolist(), strict=True)
        ):
            for start in range(0, num_queries, self._max_queries):
                count = min(self._max_queries, num_queries - start)
                unit = _Unit(request, first_token + start, context - num_queries + start, count, window)
                by_size.setdefault(min(n for n in self._rows_by_queries if n >= count), []).append(unit)
            first_token += num_queries
        groups = []
        for size, units in by_size.items():
            units.sort(key=lambda unit: -unit.num_tiles)
            max_tiles = _MAX_GROUP_SCORES // (self._num_kv_heads * self._rows_by_queries[size] * KEYS_PER_TILE)
            groups += [self._group(size, part, batch, num_slots, window) for part in _split(units, max_tiles)]
        return groups

    def _group(
        self, queries_per_unit: int, units: Sequence[_Unit], batch: Batch, num_slots: int, window: int | None
    ) -> _Group:
        """``units``: longest first, so that the units with a k-th tile come first."""
        num_tiles = np.array([unit.num_tiles for unit in units])
        counts = np.array([unit.num_queries for unit in units])
        first_tokens = np.array([unit.first_token for unit in units])
        first_positions = np.array([unit.first_position for unit in units])
        requests = np.array([unit.request for unit in units])
        units_per_step = tuple(int((num_tiles > step).sum()) for step in range(num_tiles[0]))
        tile_units = np.concatenate([np.arange(count) for count in units_per_step])
        first_tiles = np.array([unit.first_tile for unit in units])
        tile_numbers = first_tiles[tile_units] + np.repeat(np.arange(len(units_per_step)), units_per_step)

        offsets = np.arange(queries_per_unit)
        present = offsets < counts[:, None]
        tokens = first_tokens[:, None] + offsets

        num_rows = self._rows_by_queries[queries_per_unit]
        row_offsets = np.minimum(np.arange(num_rows) // self._heads_per_group, queries_per_unit - 1)
        row_positions = first_positions[:, None] + row_offsets
        key_positions = tile_numbers[:, None] * KEYS_PER_TILE + np.arange(KEYS_PER_TILE)
        last_seen = row_positions[tile_units][:, :, None]
        visible = key_positions[:, None, :] <= last_seen
        if window is not None:
            visible &= key_positions[:, None, :] > last_seen - window

        put = self._put
        return _Group(
            queries_per_unit=queries_per_unit,
            num_rows=num_rows,
            query_tokens=put(np.where(present, tokens, first_tokens[:, None]).ravel()),
            output_tokens=put(np.where(present, tokens, batch.num_tokens).ravel()),
            tile_units=put(tile_units),
            units_per_step=units_per_step,
            gathered=put(self._gathered(requests[tile_units], key_positions, batch, num_slots, window)),
            bias=torch.zeros(visible.shape, device=self._device).masked_fill_(~put(visible), -math.inf),
        )

    def _gathered(
        self, requests: IntArray, key_positions: IntArray, batch: Batch, num_slots: int, window: int | None
    ) -> IntArray:
        """Where each tile's keys lie, in stretches of tokens that are neighbours in the pool for any block size.

        Positions outside the context, or before the first token's window, read the stretch with the newest token
        instead, because weights of 0 may only meet the request's own, finite numbers.
        """
        tokens_per_block = batch.tokens_per_block
        stretch = math.gcd(tokens_per_block, KEYS_PER_TILE)
        positions = key_positions[:, ::stretch]
        contexts = batch.host_context_lens[requests][:, None]
        begins = contexts - batch.host_query_lens[requests][:, None] - ((window or contexts) - 1)
        is_seen = (positions < contexts) & (positions + stretch > begins)
        positions = np.where(is_seen, positions, (contexts - 1) // stretch * stretch)
        blocks = batch.host_block_tables[requests[:, None], positions // tokens_per_block].astype(np.int64)
        places = (blocks * tokens_per_block + positions % tokens_per_block) // stretch
        stretches_per_head = num_slots // stretch
        return (np.arange(self._num_kv_heads)[:, None, None] * stretches_per_head + places).ravel()

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _split(units: Sequence[_Unit], max_tiles: int) -> list[list[_Unit]]:
    """Neighbouring units with at most ``max_tiles`` tiles together; a larger unit stands alone."""
    parts: list[list[_Unit]] = []
    num_tiles = 0
    for unit in units:
        num_tiles += unit.num_tiles
        if not parts or num_tiles > max_tiles:
            parts.append([])
            num_tiles = unit.num_tiles
        parts[-1].append(unit)
    return parts


def _add_tiles(parts: Tensor, units_per_step: tuple[int, ...]) -> Tensor:
    """[num_kv_heads, N, ...] -> [num_kv_heads, U, ...]: each unit's tiles, added from the first to the last."""
    total, at = parts[:, : units_per_step[0]], units_per_step[0]
    for count in units_per_step[1:]:
        total[:, :count] += parts[:, at : at + count]
        at += count
    return total


def _max_tiles(parts: Tensor, units_per_step: tuple[int, ...]) -> Tensor:
    """As ``_add_tiles``, but the maximum."""
    highest, at = parts[:, : units_per_step[0]], units_per_step[0]
    for count in units_per_step[1:]:
        torch.maximum(highest[:, :count], parts[:, at : at + count], out=highest[:, :count])
        at += count
    return highest


def _one_by_one(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([torch.mm(x, y) for x, y in zip(a, b, strict=True)])


def _probe(candidates: Sequence[int], head_dim: int, device: torch.device) -> tuple[Matmul, tuple[int, ...]]:
    """The product to use, and the row counts that give the same bits for every number of tiles at once.

    Tiles are multiplied one by one if a batched GEMM depends on its batch for every row count.
    """
    generator = torch.Generator().manual_seed(0)
    num_tiles, num_rows = max(_PROBE_BATCHES), candidates[-1]
    q = torch.randn((num_tiles, num_rows, head_dim), generator=generator).to(device)
    k, v = (torch.randn((num_tiles, KEYS_PER_TILE, head_dim), generator=generator).to(device) for _ in range(2))

    def tiles(matmul: Matmul, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        scores = matmul(q.contiguous(), k.mT) * head_dim**-0.5
        weights = (scores - scores.amax(-1, keepdim=True)).exp_()
        return weights, weights.sum(-1), matmul(weights, v)

    shuffled = torch.randperm(num_rows, generator=generator).to(device)

    for matmul in (torch.bmm, _one_by_one):
        reference = tiles(matmul, q, k, v)
        orders = (
            (q, k, v, reference),
            (q[:, shuffled], k, v, tuple(part[:, shuffled] for part in reference)),
            (q.flip(0), k.flip(0), v.flip(0), tuple(part.flip(0) for part in reference)),
        )
        kept = tuple(
            rows
            for rows in candidates
            if all(
                torch.equal(result, matching[:batch, :rows])
                for batch in _PROBE_BATCHES
                for some_q, some_k, some_v, expected in orders
                for result, matching in zip(
                    tiles(matmul, some_q[:batch, :rows], some_k[:batch], some_v[:batch]), expected, strict=True
                )
            )
        )
        if num_rows in kept:
            return matmul, kept
    raise ValueError(f"attention in tiles of {num_rows} rows depends on a row's place in the tile")
