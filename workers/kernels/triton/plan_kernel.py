"""The Triton kernels of ``workers.packed_batch``. Importing this module needs the package ``triton``."""

import triton
import triton.language as tl


def _unpack(
    token_ids: tl.tensor,
    query_starts: tl.tensor,
    rows: tl.tensor,
    num_blocks: tl.tensor,
    num_kept: tl.tensor,
    first_values: tl.tensor,
    values: tl.tensor,
    kept_tables: tl.tensor,
    last_tokens: tl.tensor,
    block_tables: tl.tensor,
    kept_stride: tl.tensor,
    table_stride: tl.tensor,
    tile_blocks: tl.constexpr,
) -> None:
    """One program: ``tile_blocks`` blocks of one request's table, whose kept copy is row ``rows[request]``.

    The first ``num_kept`` blocks are as the copy has them, and the rest come from ``values``. The table goes to
    ``block_tables``, and what is new to the copy, too. A request whose last fed token is below 0 gets its row's token.
    """
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request).to(tl.int64)
    number = tl.program_id(1) * tile_blocks + tl.arange(0, tile_blocks)
    exists = number < tl.load(num_blocks + request)
    kept = tl.load(num_kept + request)
    is_new = number >= kept
    new_at = tl.load(first_values + request) + number - kept
    new = tl.load(values + new_at, mask=exists & is_new, other=0)
    old = tl.load(kept_tables + row * kept_stride + number, mask=exists & (number < kept), other=0)
    block = tl.where(is_new, new, old)
    tl.store(block_tables + request * table_stride + number, block, mask=exists)
    tl.store(kept_tables + row * kept_stride + number, block, mask=exists & is_new)
    if tl.program_id(1) == 0:
        at = tl.load(query_starts + request + 1) - 1
        token = tl.load(token_ids + at)
        if token < 0:
            tl.store(token_ids + at, tl.load(last_tokens + row))


def _keep_tokens(
    tokens: tl.tensor, rows: tl.tensor, last_tokens: tl.tensor, count: tl.tensor, tile: tl.constexpr
) -> None:
    """One program: ``tile`` tokens. Token n becomes the last one of row ``rows[n]``."""
    number = tl.program_id(0) * tile + tl.arange(0, tile)
    exists = number < count
    token = tl.load(tokens + number, mask=exists, other=0)
    row = tl.load(rows + number, mask=exists, other=0)
    tl.store(last_tokens + row, token.to(tl.int32), mask=exists)


_FIELDS = ["token_ids", "query_starts", "rows", "num_blocks", "num_kept", "first_values", "values"]

# The fields lie anywhere in one buffer, and sizes change between steps: all of them run the same machine code.
unpack = triton.jit(
    do_not_specialize=["kept_stride", "table_stride"], do_not_specialize_on_alignment=[*_FIELDS, "block_tables"]
)(_unpack)
keep_tokens = triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["tokens", "rows"])(_keep_tokens)
