"""The Triton kernels of ``workers.kernels.triton.row_ops``. Importing this module needs the package ``triton``.

A program computes one row, or a fixed part of one row, and sums in float32 in an order that only the row's width
decides. No machine code is made for an argument that changes between steps. So a row has the same bits in any batch.
"""

import triton
import triton.language as tl


def _rms_norm(
    x: tl.tensor,
    weight: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    x_row_stride: tl.tensor,
    width: tl.constexpr,
    padded: tl.constexpr,
    adds: tl.constexpr,
) -> None:
    """One program: one row. ``residual`` is read only if ``adds``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, padded)
    exists = columns < width
    numbers = tl.load(x + row * x_row_stride + columns, mask=exists, other=0.0).to(tl.float32)
    gain = tl.load(weight + columns, mask=exists, other=0.0).to(tl.float32)
    y = numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) / width + eps) * gain
    if adds:
        y += tl.load(residual + row * width + columns, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, y.to(out.dtype.element_ty), mask=exists)


def _layer_norm(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    x_row_stride: tl.tensor,
    width: tl.constexpr,
    padded: tl.constexpr,
) -> None:
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, padded)
    exists = columns < width
    numbers = tl.load(x + row * x_row_stride + columns, mask=exists, other=0.0).to(tl.float32)
    centred = tl.where(exists, numbers - tl.sum(numbers, 0) / width, 0.0)
    y = centred * tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    gain = tl.load(weight + columns, mask=exists, other=0.0).to(tl.float32)
    y = y * gain + tl.load(bias + columns, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, y.to(out.dtype.element_ty), mask=exists)


def _softmax(x: tl.tensor, out: tl.tensor, x_row_stride: tl.tensor, width: tl.constexpr, padded: tl.constexpr) -> None:
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, padded)
    exists = columns < width
    numbers = tl.load(x + row * x_row_stride + columns, mask=exists, other=float("-inf")).to(tl.float32)
    shares = tl.exp(numbers - tl.max(numbers, 0))
    tl.store(out + row * width + columns, (shares / tl.sum(shares, 0)).to(out.dtype.element_ty), mask=exists)


def _gated(
    gate_up: tl.tensor,
    out: tl.tensor,
    gate_up_row_stride: tl.tensor,
    width: tl.constexpr,
    tile_columns: tl.constexpr,
    is_silu: tl.constexpr,
) -> None:
    """One program: ``tile_columns`` results of one row. The tanh of GELU is written as a sigmoid."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    exists = columns < width
    start = gate_up + row * gate_up_row_stride
    gate = tl.load(start + columns, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(start + width + columns, mask=exists, other=0.0).to(tl.float32)
    argument = gate
    if not is_silu:
        argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # twice tanh's, with sqrt(2 / pi)
    y = gate * tl.sigmoid(argument) * up
    tl.store(out + row * width + columns, y.to(out.dtype.element_ty), mask=exists)


def _place_heads(
    heads: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    query_gain: tl.tensor,
    key_gain: tl.tensor,
    eps: tl.tensor,
    key_head_stride: tl.tensor,
    value_head_stride: tl.tensor,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    padded_half: tl.constexpr,
    tile_heads: tl.constexpr,
    norms: tl.constexpr,
    rotates: tl.constexpr,
) -> None:
    """One program: ``tile_heads`` heads of one token, in two halves, which RoPE turns together.

    A head of the query goes to ``query``; keys and values go to the token's slot, unless the slot is negative.
    ``cos`` and ``sin`` are read only if it ``rotates``, the gains only if it ``norms``.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * tile_heads + tl.arange(0, tile_heads)
    pair = tl.arange(0, padded_half)
    half: tl.constexpr = head_dim // 2
    num_rows: tl.constexpr = num_heads + 2 * num_kv_heads
    is_query = head < num_heads
    is_key = (head >= num_heads) & (head < num_heads + num_kv_heads)
    is_value = (head >= num_heads + num_kv_heads) & (head < num_rows)
    pair_exists = pair < half
    exists = (head < num_rows)[:, None] & pair_exists[None, :]
    at = (token * num_rows + head)[:, None] * head_dim + pair[None, :]
    loaded_first = tl.load(heads + at, mask=exists, other=0.0)
    loaded_second = tl.load(heads + at + half, mask=exists, other=0.0)
    first, second = loaded_first.to(tl.float32), loaded_second.to(tl.float32)

    if norms:
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / head_dim
        factor = tl.rsqrt(mean + eps)[:, None]
        query_first = tl.load(query_gain + pair, mask=pair_exists, other=0.0).to(tl.float32)[None, :]
        query_second = tl.load(query_gain + half + pair, mask=pair_exists, other=0.0).to(tl.float32)[None, :]
        key_first = tl.load(key_gain + pair, mask=pair_exists, other=0.0).to(tl.float32)[None, :]
        key_second = tl.load(key_gain + half + pair, mask=pair_exists, other=0.0).to(tl.float32)[None, :]
        first = first * factor * tl.where(is_query[:, None], query_first, key_first)
        second = second * factor * tl.where(is_query[:, None], query_second, key_second)
    if rotates:
        angle = token * half + pair
        turn_cos = tl.load(cos + angle, mask=pair_exists, other=1.0)[None, :]
        turn_sin = tl.load(sin + angle, mask=pair_exists, other=0.0)[None, :]
        turned = first * turn_cos - second * turn_sin
        second = second * turn_cos + first * turn_sin
        first = turned

    query_at = (token * num_heads + head)[:, None] * head_dim + pair[None, :]
    to_query = is_query[:, None] & pair_exists[None, :]
    tl.store(query + query_at, first.to(query.dtype.element_ty), mask=to_query)
    tl.store(query + query_at + half, second.to(query.dtype.element_ty), mask=to_query)

    slot = tl.load(slots + token).to(tl.int64)
    stored = pair_exists & (slot >= 0)
    key_at = ((head - num_heads).to(tl.int64) * key_head_stride + slot * head_dim)[:, None] + pair[None, :]
    to_keys = is_key[:, None] & stored[None, :]
    tl.store(keys + key_at, first.to(keys.dtype.element_ty), mask=to_keys)
    tl.store(keys + key_at + half, second.to(keys.dtype.element_ty), mask=to_keys)
    value_head = (head - num_heads - num_kv_heads).to(tl.int64)
    value_at = (value_head * value_head_stride + slot * head_dim)[:, None] + pair[None, :]
    to_values = is_value[:, None] & stored[None, :]
    tl.store(values + value_at, loaded_first.to(values.dtype.element_ty), mask=to_values)
    tl.store(values + value_at + half, loaded_second.to(values.dtype.element_ty), mask=to_values)


rms_norm = triton.jit(_rms_norm)
layer_norm = triton.jit(_layer_norm)
softmax = triton.jit(do_not_specialize_on_alignment=["x"])(_softmax)  # of a few experts, in any number
gated = triton.jit(_gated)
place_heads = triton.jit(do_not_specialize_on_alignment=["slots"])(_place_heads)
