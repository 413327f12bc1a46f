"""The Triton kernel of ``workers.attention.triton_paged``. Importing this module needs the package ``triton``."""

import triton
import triton.language as tl


def _paged_attention(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    block_tables: tl.tensor,
    num_requests: tl.tensor,
    tokens_per_block: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
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
) -> None:
    """One program: ``tile_queries`` query tokens of one request, times the ``group_heads`` heads of one key head.

    Row r of the tile is query token ``r // group_heads`` and head ``r % group_heads``; rows beyond are padding.
    Tiles of ``tile_keys`` keys at absolute positions enter an online softmax in ascending order (Milakov and
    Gimelshein, 2018; Dao, "FlashAttention-2", 2023, algorithm 1). A tile in which a row sees no key does not change
    that row's bits: its weights are exactly 0 and its old sums are scaled by exactly 1.
    """
    tile = tl.program_id(0)
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
    if first < num_queries:
        context_len = tl.load(context_lens + request)
        rows = tl.arange(0, tile_rows)
        dims = tl.arange(0, padded_dim)
        dim_exists = dims < head_dim
        token = first + rows // group_heads
        head = (kv_head * group_heads + rows % group_heads).to(tl.int64)
        row_exists = (token < num_queries) & (rows < tile_queries * group_heads)
        end = tl.minimum(context_len, context_len - num_queries + first + tile_queries)
        position = tl.minimum(context_len - num_queries + token, end - 1)  # padding sees a key too
        at = (query_start + token).to(tl.int64)

        query_at = (at * query_token_stride + head * query_head_stride)[:, None] + dims[None, :]
        exists = row_exists[:, None] & dim_exists[None, :]
        tile_query = tl.load(query + query_at, mask=exists, other=0.0)

        best = tl.full([tile_rows], float("-inf"), tl.float32)
        total = tl.zeros([tile_rows], tl.float32)
        sums = tl.zeros([tile_rows, padded_dim], tl.float32)
        key_base = keys + kv_head.to(tl.int64) * key_head_stride
        value_base = values + kv_head.to(tl.int64) * value_head_stride
        table = block_tables + request * table_stride
        begin = tl.maximum(context_len - num_queries + first - window + 1, 0) // tile_keys * tile_keys
        for start in range(begin, end, tile_keys):
            key_position = start + tl.arange(0, tile_keys)
            key_exists = key_position < end
            block = tl.load(table + key_position // tokens_per_block, mask=key_exists, other=0)
            slot = block.to(tl.int64) * tokens_per_block + key_position % tokens_per_block

            key = tl.load(
                key_base + (slot * key_slot_stride)[None, :] + dims[:, None],
                mask=dim_exists[:, None] & key_exists[None, :],
                other=0.0,
            )
            scores = tl.dot(tile_query, key, input_precision="ieee") * scale
            visible = (key_position[None, :] <= position[:, None]) & key_exists[None, :]
            visible = visible & (key_position[None, :] > position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))

            new_best = tl.maximum(best, tl.max(scores, 1))
            subtracted = tl.where(
                new_best == float("-inf"), 0.0, new_best
            )  # minus infinity: a row that has seen no key yet
            keep = tl.exp(best - subtracted)
            weights = tl.exp(scores - subtracted[:, None])
            total = total * keep + tl.sum(weights, 1)
            value = tl.load(
                value_base + (slot * value_slot_stride)[:, None] + dims[None, :],
                mask=key_exists[:, None] & dim_exists[None, :],
                other=0.0,
            )
            sums = tl.dot(weights.to(value.dtype), value, sums * keep[:, None], input_precision="ieee")
            best = new_best

        out_at = (at * out_token_stride + head * out_head_stride)[:, None] + dims[None, :]
        tl.store(out + out_at, (sums / total[:, None]).to(out.dtype.element_ty), mask=exists)


# No specialisation on arguments that change between steps: every batch and block size runs the same machine code.
paged_attention = triton.jit(
    do_not_specialize=["num_requests", "tokens_per_block", "table_stride", "window"],
    do_not_specialize_on_alignment=["query_starts", "context_lens", "block_tables"],
)(_paged_attention)
