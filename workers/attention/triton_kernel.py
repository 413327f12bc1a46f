"""The Triton kernels of ``workers.attention.triton_paged``. Importing this module needs the package ``triton``.

A request's keys are cut into splits of ``split_keys`` at absolute positions. A split's result is a partial softmax: the
largest score, the sum of weights and the sum of weighted values. Splits are folded in ascending order. `prefill` does
both in one program. `decode_splits` writes the partial results of one split, and `decode_merge` folds them. All three
call the same functions, and no multiplication and addition is fused except by `tl.fma`, so a query gets the same bits
from either.
"""

import triton
import triton.language as tl

_SUM_COLUMNS: tl.constexpr = tl.constexpr(8)  # all are equal; a matrix instruction has no fewer


@triton.jit  # type: ignore[untyped-decorator]
def _split(
    tile_query: tl.tensor,
    key_base: tl.tensor,
    value_base: tl.tensor,
    table: tl.tensor,
    split: tl.tensor,
    first_position: tl.tensor,
    last_position: tl.tensor,
    position: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    key_slot_stride: tl.tensor,
    value_slot_stride: tl.tensor,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    split_keys: tl.constexpr,
    tokens_per_block: tl.constexpr,
    table_step: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The partial softmax over split number ``split``: largest score, sum of weights (both [rows]) and sum of weighted
    values ([rows, padded_dim]). float32, scores in units of log2.

    The rows stand at ``position`` [rows], from ``first_position`` to ``last_position``. Tiles of ``tile_keys`` keys
    enter an online softmax in ascending order (Milakov and Gimelshein, 2018; Dao, "FlashAttention-2", 2023, algorithm
    1). A tile in which a row sees no key does not change that row's bits: its weights are exactly 0 and its old sums
    are scaled by exactly 1. Weights are summed by a product with ones, because the order of `tl.sum` follows from how
    the compiler spreads a tile over warps; a product's sums have one order for all shapes of tiles.
    """
    dims = tl.arange(0, padded_dim)
    dim_exists = dims < head_dim
    best = tl.full([tile_rows], float("-inf"), tl.float32)
    ones = tl.full([tile_keys, _SUM_COLUMNS], 1.0, value_base.dtype.element_ty)
    totals = tl.zeros([tile_rows, _SUM_COLUMNS], tl.float32)
    sums = tl.zeros([tile_rows, padded_dim], tl.float32)
    first_seen = first_position - window + 1
    begin = tl.maximum(split * split_keys, first_seen) // tile_keys * tile_keys
    end = tl.minimum(split * split_keys + split_keys, last_position + 1)
    keys_of_tile = tl.arange(0, tile_keys)
    number = (begin + keys_of_tile) // tokens_per_block
    block = tl.load(table + number * table_step, mask=begin + keys_of_tile < end, other=0)
    for start in range(begin, end, tile_keys):
        key_position = start + keys_of_tile
        key_exists = (key_position >= first_seen) & (key_position < end)  # blocks before the window were given up
        slot = block.to(tl.int64) * tokens_per_block + key_position % tokens_per_block
        key = tl.load(
            key_base + (slot * key_slot_stride)[None, :] + dims[:, None],
            mask=dim_exists[:, None] & key_exists[None, :],
            other=0.0,
        )
        value = tl.load(
            value_base + (slot * value_slot_stride)[:, None] + dims[None, :],
            mask=key_exists[:, None] & dim_exists[None, :],
            other=0.0,
        )
        # Block numbers are read a tile ahead: the loads of keys, which wait for them, can then run further ahead.
        following = key_position + tile_keys
        block = tl.load(table + following // tokens_per_block * table_step, mask=following < end, other=0)
        distance = position[:, None] - key_position[None, :]  # as unsigned, that of a later key is beyond any window
        visible = distance.to(tl.uint32, bitcast=True) < window.to(tl.uint32, bitcast=True)
        scores = tl.where(visible, tl.dot(tile_query, key, input_precision="ieee"), float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1) * scale)
        subtracted = tl.where(new_best == float("-inf"), 0.0, new_best)  # minus infinity: no key seen yet
        keep = tl.exp2(best - subtracted)
        weights = tl.exp2(tl.fma(scores, scale, -subtracted[:, None]))
        weights = weights.to(value.dtype)
        totals = tl.dot(weights, ones, totals * keep[:, None], input_precision="ieee")
        sums = tl.dot(weights, value, sums * keep[:, None], input_precision="ieee")
        best = new_best
    return best, tl.max(totals, 1), sums


@triton.jit  # type: ignore[untyped-decorator]
def _fold(best: tl.tensor, total: tl.tensor, sums: tl.tensor, other_best: tl.tensor, other_total: tl.tensor,
          other_sums: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Add a later split's partial softmax ([rows], [rows], [rows, dims]) to those of the splits before it."""
    new_best = tl.maximum(best, other_best)
    subtracted = tl.where(new_best == float("-inf"), 0.0, new_best)
    keep = tl.exp2(best - subtracted)
    add = tl.exp2(other_best - subtracted)
    total = tl.fma(total, keep, other_total * add)
    sums = tl.fma(sums, tl.zeros_like(sums) + keep[:, None], other_sums * add[:, None])
    return new_best, total, sums


def _prefill(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    block_tables: tl.tensor,
    num_requests: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    least_queries: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_head_stride: tl.tensor,
    key_slot_stride: tl.tensor,
    value_head_stride: tl.tensor,
    value_slot_stride: tl.tensor,
    out_token_stride: tl.tensor,
    out_head_stride: tl.tensor,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    group_heads: tl.constexpr,
    tile_queries: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    split_keys: tl.constexpr,
    tokens_per_block: tl.constexpr,
    table_step: tl.constexpr,
) -> None:
    """One program: ``tile_queries`` query tokens of one request, times the ``group_heads`` heads of one key head, over
    all splits. Requests with fewer than ``least_queries`` tokens are left out.

    Row r of the tile is query token ``r // group_heads`` and head ``r % group_heads``; rows beyond are padding.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # a prompt's last queries see most keys, so they start first
    kv_head = tl.program_id(1)

    # Tiles of request r begin at number query_starts[r] // tile_queries + r, so the host need not know the lengths.
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // tile_queries + middle <= tile:
            low = middle + 1
        else:
            high = middle
    request = tl.cast(low - 1, tl.int64)
    query_start = tl.load(query_starts + request)
    num_queries = tl.load(query_starts + request + 1) - query_start
    first = (tile - (query_start // tile_queries + low - 1)) * tile_queries
    if (first < num_queries) & (num_queries >= least_queries):
        rows = tl.arange(0, tile_rows)
        dims = tl.arange(0, padded_dim)
        token = first + rows // group_heads
        head = (kv_head * group_heads + rows % group_heads).to(tl.int64)
        row_exists = (token < num_queries) & (rows < tile_queries * group_heads)
        first_position = tl.load(context_lens + request) - num_queries + first
        last_position = first_position + tl.minimum(num_queries - first, tile_queries) - 1
        position = tl.minimum(first_position + rows // group_heads, last_position)  # padding sees a key too
        at = (query_start + token).to(tl.int64)
        query_at = (at * query_token_stride + head * query_head_stride)[:, None] + dims[None, :]
        exists = row_exists[:, None] & (dims < head_dim)[None, :]
        tile_query = tl.load(query + query_at, mask=exists, other=0.0)
        key_base = keys + kv_head.to(tl.int64) * key_head_stride
        value_base = values + kv_head.to(tl.int64) * value_head_stride
        table = block_tables + request * table_stride

        best = tl.full([tile_rows], float("-inf"), tl.float32)
        total = tl.zeros([tile_rows], tl.float32)
        sums = tl.zeros([tile_rows, padded_dim], tl.float32)
        first_split = tl.maximum(first_position - window + 1, 0) // split_keys
        for split in range(first_split, last_position // split_keys + 1):
            split_best, split_total, split_sums = _split(
                tile_query, key_base, value_base, table, split, first_position, last_position, position, window, scale,
                key_slot_stride, value_slot_stride, head_dim, padded_dim, tile_rows, tile_keys, split_keys,
                tokens_per_block, table_step,
            )  # fmt: skip
            best, total, sums = _fold(best, total, sums, split_best, split_total, split_sums)

        out_at = (at * out_token_stride + head * out_head_stride)[:, None] + dims[None, :]
        tl.store(out + out_at, (sums / total[:, None]).to(out.dtype.element_ty), mask=exists)


@triton.jit  # type: ignore[untyped-decorator]
def _num_splits(
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    request: tl.tensor,
    num_requests: tl.tensor,
    window: tl.tensor,
    split_keys: tl.constexpr,
) -> tl.tensor:
    """How many splits each ``request`` sees, if it feeds exactly one token; 0 for all others."""
    exists = request < num_requests
    query_start = tl.load(query_starts + request, mask=exists, other=0)
    query_end = tl.load(query_starts + request + 1, mask=exists, other=0)
    context_len = tl.load(context_lens + request, mask=exists, other=0)
    first_split = tl.maximum(context_len - window, 0) // split_keys
    return tl.where(query_end - query_start == 1, (context_len - 1) // split_keys + 1 - first_split, 0)


def _decode_splits(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    split_sums: tl.tensor,
    split_stats: tl.tensor,
    first_items: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    block_tables: tl.tensor,
    num_requests: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_head_stride: tl.tensor,
    key_slot_stride: tl.tensor,
    value_head_stride: tl.tensor,
    value_slot_stride: tl.tensor,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    group_heads: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    split_keys: tl.constexpr,
    tokens_per_block: tl.constexpr,
    table_step: tl.constexpr,
    requests_at_once: tl.constexpr,
) -> None:
    """The splits of all requests that feed one token, one after another: an item is a split of a request. The programs
    of a key head share its items evenly, so the grid need not follow the lengths.

    Item i writes ``split_sums`` [items, num_heads, head_dim] and ``split_stats`` [items, num_heads, 2: best, total].
    ``first_items`` [requests] gets each request's first item.
    """
    kv_head = tl.program_id(1)
    lanes = tl.arange(0, requests_at_once)
    num_items = 0
    for base in range(0, num_requests, requests_at_once):
        num_items += tl.sum(_num_splits(query_starts, context_lens, base + lanes, num_requests, window, split_keys))
    begin = (tl.program_id(0).to(tl.int64) * num_items // tl.num_programs(0)).to(tl.int32)
    end = ((tl.program_id(0) + 1).to(tl.int64) * num_items // tl.num_programs(0)).to(tl.int32)

    # The request of item ``begin``, and that request's first item.
    request = 0
    first_item = 0
    counted = 0
    for base in range(0, num_requests, requests_at_once):
        counts = _num_splits(query_starts, context_lens, base + lanes, num_requests, window, split_keys)
        ends = counted + tl.cumsum(counts, 0)
        request += tl.sum((ends <= begin).to(tl.int32))
        first_item = tl.maximum(first_item, tl.max(tl.where(ends <= begin, ends, 0)))
        counted += tl.sum(counts)

    rows = tl.arange(0, tile_rows)
    dims = tl.arange(0, padded_dim)
    head = (kv_head * group_heads + rows).to(tl.int64)
    row_exists = rows < group_heads
    exists = row_exists[:, None] & (dims < head_dim)[None, :]
    key_base = keys + kv_head.to(tl.int64) * key_head_stride
    value_base = values + kv_head.to(tl.int64) * value_head_stride
    count = _num_splits(query_starts, context_lens, request, num_requests, window, split_keys)
    for item in range(begin, end):
        while item >= first_item + count:
            first_item += count
            request += 1
            count = _num_splits(query_starts, context_lens, request, num_requests, window, split_keys)
        position = tl.load(context_lens + request) - 1
        split = tl.maximum(position - window + 1, 0) // split_keys + item - first_item
        token = tl.load(query_starts + request).to(tl.int64)
        query_at = (token * query_token_stride + head * query_head_stride)[:, None] + dims[None, :]
        tile_query = tl.load(query + query_at, mask=exists, other=0.0)
        table = block_tables + tl.cast(request, tl.int64) * table_stride
        best, total, sums = _split(
            tile_query, key_base, value_base, table, split, position, position, tl.zeros_like(rows) + position, window,
            scale, key_slot_stride, value_slot_stride, head_dim, padded_dim, tile_rows, tile_keys, split_keys,
            tokens_per_block, table_step,
        )  # fmt: skip
        row_at = tl.cast(item, tl.int64) * num_heads + head
        tl.store(split_sums + (row_at * head_dim)[:, None] + dims[None, :], sums, mask=exists)
        tl.store(split_stats + row_at * 2, best, mask=row_exists)
        tl.store(split_stats + row_at * 2 + 1, total, mask=row_exists)
        if (item == first_item) & (kv_head == 0):
            tl.store(first_items + request, item)


def _decode_merge(
    split_sums: tl.tensor,
    split_stats: tl.tensor,
    first_items: tl.tensor,
    out: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    num_requests: tl.tensor,
    window: tl.tensor,
    out_token_stride: tl.tensor,
    out_head_stride: tl.tensor,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    split_keys: tl.constexpr,
    loads_ahead: tl.constexpr,
) -> None:
    """One program: one head of a request that feeds one token."""
    request = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    count = _num_splits(query_starts, context_lens, request, num_requests, window, split_keys)
    if count > 0:
        row = tl.load(first_items + request).to(tl.int64) * num_heads + head
        dims = tl.arange(0, padded_dim)[None, :]
        exists = dims < head_dim
        one = tl.arange(0, 1)
        best = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        sums = tl.zeros([1, padded_dim], tl.float32)
        for number in tl.range(0, count, num_stages=loads_ahead):
            at = row + number * num_heads
            split_best = tl.load(split_stats + at * 2 + one)
            split_total = tl.load(split_stats + at * 2 + 1 + one)
            of_split = tl.load(split_sums + at * head_dim + dims, mask=exists, other=0.0)
            best, total, sums = _fold(best, total, sums, split_best, split_total, of_split)
        token = tl.load(query_starts + request).to(tl.int64)
        out_at = token * out_token_stride + head * out_head_stride + dims
        tl.store(out + out_at, (sums / total[:, None]).to(out.dtype.element_ty), mask=exists)


# No specialisation on arguments that change between steps: every batch runs the same machine code.
_OF_A_STEP = ["num_requests", "table_stride", "window"]
_TABLES = ["query_starts", "context_lens", "block_tables"]
prefill = triton.jit(do_not_specialize=[*_OF_A_STEP, "least_queries"], do_not_specialize_on_alignment=_TABLES)(_prefill)
decode_splits = triton.jit(do_not_specialize=_OF_A_STEP, do_not_specialize_on_alignment=_TABLES)(_decode_splits)
decode_merge = triton.jit(do_not_specialize=_OF_A_STEP[:1], do_not_specialize_on_alignment=_TABLES[:2])(_decode_merge)
