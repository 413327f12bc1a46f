"""The Triton kernels of ``workers.kernels.triton.grouped``. Importing this module needs the package ``triton``."""

# mypy: disable-error-code="untyped-decorator"

import triton
import triton.language as tl

PLAIN, INT4, INT8, FP8 = (tl.constexpr(form) for form in range(4))


@triton.jit
def _fp8_to_half(byte: tl.tensor) -> tl.tensor:
    """E4M3 numbers times 2**-8, as float16: the bits fit its exponent and its mantissa. NaN becomes 480 * 2**-8."""
    wide = byte.to(tl.int16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit(do_not_specialize=["num_rows", "num_row_tiles"])
def grouped_linear(
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    num_rows: tl.tensor,
    num_row_tiles: tl.tensor,
    num_experts: tl.tensor,
    in_features: tl.tensor,
    out_features: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    out_stride: tl.tensor,
    form: tl.constexpr,
    middle: tl.constexpr,
    group_inputs: tl.constexpr,
    padded_experts: tl.constexpr,
    gathered_ranks: tl.constexpr,
    scatters: tl.constexpr,
    tile_out: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_in: tl.constexpr,
) -> None:
    """One program: ``tile_out`` outputs of ``tile_rows`` rows of one expert.

    Rows at positions ``starts[e]`` to ``starts[e + 1]`` belong to expert e; without ``starts`` all rows belong to one
    expert. Position p reads row p of ``x``, or with ``gathered_ranks`` row ``order[p] // gathered_ranks``. It writes
    row p of ``out``, or if it ``scatters`` row ``order[p]``.

    The weight is the first factor, so that the rows are the instruction's free side. Products enter float32 sums in
    order of the input's number. Those of a packed weight are summed exactly as integers or FP8 numbers for ``tile_in``
    inputs, and then scaled. ``middle`` is the zero point where there is no tensor of them.
    """
    program = tl.program_id(0)
    row_tile = program % num_row_tiles  # neighbours share a tile of the weight
    out_tile = program // num_row_tiles
    if starts is None:
        expert = tl.full([], 0, tl.int64)
        begin = row_tile * tile_rows
        end = num_rows
        is_used = True
    else:
        number = tl.arange(0, padded_experts)
        first = tl.load(starts + number, mask=number < num_experts, other=0)
        last = tl.load(starts + number + 1, mask=number < num_experts, other=0)
        tiles = (last - first + tile_rows - 1) // tile_rows
        ends = tl.cumsum(tiles, 0)
        found = tl.sum((ends <= row_tile).to(tl.int32), 0)
        is_used = found < num_experts
        expert = tl.minimum(found, num_experts - 1).to(tl.int64)
        tiles_before = tl.sum(tl.where(number == expert, ends - tiles, 0), 0)
        begin = tl.load(starts + expert) + (row_tile - tiles_before) * tile_rows
        end = tl.load(starts + expert + 1)
    if is_used:
        position = begin + tl.arange(0, tile_rows)
        exists = position < end
        place = position.to(tl.int64)
        if order is not None:
            place = tl.load(order + position, mask=exists, other=0)
        source = position.to(tl.int64)
        if gathered_ranks > 0:
            source = place // gathered_ranks
        output = out_tile * tile_out + tl.arange(0, tile_out)
        read_output = expert * out_features + tl.minimum(output, out_features - 1)
        x_at = x + (source * x_stride)[None, :]
        num_groups = in_features // group_inputs
        sums = tl.zeros([tile_out, tile_rows], tl.float32)
        if form == PLAIN:
            inputs = tl.arange(0, tile_in)
            weight_at = weight + (read_output * in_features)[:, None]
            for start in range(0, in_features, tile_in):
                at = start + inputs
                reads = at < in_features
                weights = tl.load(weight_at + at[None, :], mask=reads[None, :], other=0.0)
                numbers = tl.load(x_at + at[:, None], mask=reads[:, None] & exists[None, :], other=0.0)
                sums = tl.dot(weights, numbers, sums, input_precision="ieee")
        elif form == INT4:
            half: tl.constexpr = tile_in // 2
            inputs = tl.arange(0, half)
            weight_at = weight + (read_output * (in_features // 2))[:, None]
            for start in range(0, in_features, tile_in):
                scale_at = read_output * num_groups + start // group_inputs
                byte = tl.load(weight_at + start // 2 + inputs[None, :]).to(tl.int32)
                zero = tl.full([tile_out], middle, tl.int32)
                if zeros is not None:
                    zero = tl.load(zeros + scale_at).to(tl.int32)
                lower = ((byte & 15) - zero[:, None]).to(x.dtype.element_ty)
                upper = ((byte >> 4) - zero[:, None]).to(x.dtype.element_ty)
                numbers_at = x_at + (start + inputs)[:, None]
                numbers = tl.load(numbers_at, mask=exists[None, :], other=0.0)
                part = tl.dot(lower, numbers, input_precision="ieee")
                numbers = tl.load(numbers_at + half, mask=exists[None, :], other=0.0)
                part = tl.dot(upper, numbers, part, input_precision="ieee")
                sums += part * tl.load(scales + scale_at).to(tl.float32)[:, None]
        else:
            inputs = tl.arange(0, tile_in)
            weight_at = weight + (read_output * in_features)[:, None]
            for start in range(0, in_features, tile_in):
                scale_at = read_output * num_groups + start // group_inputs
                byte = tl.load(weight_at + (start + inputs)[None, :])
                if form == FP8:
                    weights = _fp8_to_half(byte).to(x.dtype.element_ty)
                else:
                    zero = tl.full([tile_out], middle, tl.int32)
                    if zeros is not None:
                        zero = tl.load(zeros + scale_at).to(tl.int32)
                    weights = (byte.to(tl.int32) - zero[:, None]).to(x.dtype.element_ty)
                numbers = tl.load(x_at + (start + inputs)[:, None], mask=exists[None, :], other=0.0)
                part = tl.dot(weights, numbers, input_precision="ieee")
                sums += part * tl.load(scales + scale_at).to(tl.float32)[:, None]

        output_exists = output < out_features
        if bias is not None:
            sums += tl.load(bias + output, mask=output_exists, other=0.0).to(tl.float32)[:, None]
        result = tl.trans(sums)
        target = position.to(tl.int64)
        if scatters:
            target = place
        written = exists[:, None] & output_exists[None, :]
        if residual is not None:
            added = tl.load(residual + (target * residual_stride)[:, None] + output[None, :], mask=written, other=0.0)
            result += added.to(tl.float32)
        tl.store(out + (target * out_stride)[:, None] + output[None, :], result.to(out.dtype.element_ty), mask=written)


@triton.jit
def choose_experts(
    logits: tl.tensor,
    shares: tl.tensor,
    experts: tl.tensor,
    num_experts: tl.tensor,
    padded_experts: tl.constexpr,
    ranks: tl.constexpr,
    padded_ranks: tl.constexpr,
    normalizes: tl.constexpr,
) -> None:
    """One program: a row's softmax and its best experts. Shares are not negative, so their bits are in their order."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, padded_experts)
    exists = number < num_experts
    logit = tl.load(logits + row * num_experts + number, mask=exists, other=float("-inf"))
    grown = tl.exp(logit - tl.max(logit, 0))
    share = grown / tl.sum(grown, 0)
    key = (share.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (padded_experts - 1 - number)
    key = tl.where(exists, key, -1)
    rank = tl.arange(0, padded_ranks)
    chosen = tl.zeros([padded_ranks], tl.int64)
    chosen_share = tl.zeros([padded_ranks], tl.float32)
    for place in tl.static_range(ranks):
        best = tl.max(key, 0)
        chosen = tl.where(rank == place, padded_experts - 1 - (best & 0xFFFFFFFF), chosen)
        chosen_share = tl.where(rank == place, (best >> 32).to(tl.int32).to(tl.float32, bitcast=True), chosen_share)
        key = tl.where(key == best, -1, key)
    if normalizes:
        chosen_share = chosen_share / tl.sum(chosen_share, 0)
    tl.store(experts + row * ranks + rank, chosen, mask=rank < ranks)
    tl.store(shares + row * ranks + rank, chosen_share, mask=rank < ranks)


@triton.jit
def add_experts(
    results: tl.tensor,
    shares: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    hidden: tl.tensor,
    residual_stride: tl.tensor,
    ranks: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One program: ``block`` numbers of one row: the residual plus the experts' results times their shares, in order of
    rank, rounded once.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    exists = column < hidden
    total = tl.load(residual + row * residual_stride + column, mask=exists, other=0.0).to(tl.float32)
    for rank in tl.static_range(ranks):
        share = tl.load(shares + row * ranks + rank)
        result = tl.load(results + (row * ranks + rank) * hidden + column, mask=exists, other=0.0)
        total += result.to(tl.float32) * share
    tl.store(out + row * hidden + column, total.to(out.dtype.element_ty), mask=exists)
