"""The Triton kernel of ``workers.kernels.triton.linear``. Importing this module needs the package ``triton``."""

import triton
import triton.language as tl


def _linear(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    in_features: tl.tensor,
    out_features: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    residual_stride: tl.tensor,
    out_stride: tl.tensor,
    tile_out: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_in: tl.constexpr,
    fills_tiles: tl.constexpr,
    row_tiles_together: tl.constexpr,
) -> None:
    """One program: ``tile_out`` outputs of ``tile_rows`` rows of ``x @ weight.T + bias + residual``.

    ``fills_tiles``: whether ``tile_in`` divides ``in_features``. ``bias`` and ``residual`` may be None. The weight is
    the first factor, so that the rows are the instruction's free side (N). Products enter the float32 sums in order of
    the input's number, in the instruction's steps of 16. Bias and residual are added to the finished sum.
    """
    # Programs that run at the same time share tiles of the weight and of the rows, which then lie in the L2 cache.
    program = tl.program_id(0)
    num_out_tiles = tl.cdiv(out_features, tile_out)
    num_row_tiles = tl.cdiv(num_rows, tile_rows)
    band = program // (row_tiles_together * num_out_tiles)
    in_band = program % (row_tiles_together * num_out_tiles)
    band_rows = tl.minimum(num_row_tiles - band * row_tiles_together, row_tiles_together)
    row_tile = band * row_tiles_together + in_band % band_rows
    out_tile = in_band // band_rows

    output = out_tile * tile_out + tl.arange(0, tile_out)
    row = row_tile * tile_rows + tl.arange(0, tile_rows)
    inputs = tl.arange(0, tile_in)
    row_exists = row < num_rows
    read_output = tl.minimum(output, out_features - 1).to(tl.int64)
    weight_at = weight + (read_output * weight_stride)[:, None] + inputs[None, :]
    x_at = x + (row.to(tl.int64) * x_stride)[None, :] + inputs[:, None]
    sums = tl.zeros([tile_out, tile_rows], tl.float32)
    for start in range(0, in_features, tile_in):
        if fills_tiles:
            weights = tl.load(weight_at)
            numbers = tl.load(x_at, mask=row_exists[None, :], other=0.0)
        else:
            exists = start + inputs < in_features
            weights = tl.load(weight_at, mask=exists[None, :], other=0.0)
            numbers = tl.load(x_at, mask=exists[:, None] & row_exists[None, :], other=0.0)
        sums = tl.dot(weights, numbers, sums)
        weight_at += tile_in
        x_at += tile_in

    output_exists = output < out_features
    if bias is not None:
        sums += tl.load(bias + output, mask=output_exists, other=0.0).to(tl.float32)[:, None]
    exists = row_exists[:, None] & output_exists[None, :]
    result = tl.trans(sums)
    row_at = row.to(tl.int64)
    if residual is not None:
        added = tl.load(residual + (row_at * residual_stride)[:, None] + output[None, :], mask=exists, other=0.0)
        result += added.to(tl.float32)
    tl.store(out + (row_at * out_stride)[:, None] + output[None, :], result.to(out.dtype.element_ty), mask=exists)


# No specialisation on the number of rows: every batch runs the same machine code.
linear = triton.jit(do_not_specialize=["num_rows"])(_linear)
