"""Integer layers are close to float layers; every kernel, batch and number of threads gives equal bits."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from workers import native
from workers.kernels.quantized_linear import MAX_IN_FEATURES, QuantizedLinear, QuantizedWeight, expand, quantize

needs_native = pytest.mark.skipif(not native.load(), reason=native.describe())
both_widths = pytest.mark.parametrize("bits", [8, 4])
kernels = pytest.mark.parametrize("kernel", ["torch", pytest.param("native", marks=needs_native)])

BITS = st.sampled_from([8, 4])
IN_FEATURES = st.one_of(st.integers(1, 700), st.sampled_from([64, 192, 576, 1536, 2048, 2052]))
ROW_KINDS = ("normal", "signs", "outlier", "zeros", "tiny", "huge", "nan", "infinity", "overflow")


@contextmanager
def using(kernel: str) -> Iterator[None]:
    """Layers made inside use torch's kernels or the native ones."""
    with pytest.MonkeyPatch.context() as patch:
        if kernel == "torch":
            patch.setattr(native, "load", lambda: False)
        yield


def make_layer(kernel: str, weight: Tensor, bias: Tensor | None, bits: int) -> tuple[QuantizedWeight, QuantizedLinear]:
    with using(kernel):
        quantized = quantize(weight, bias, bits)
        return quantized, QuantizedLinear(quantized)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_row(kind: str, width: int, seed: int) -> Tensor:
    row = normal(width, seed=seed)
    match kind:
        case "signs":  # every product is 127 * 127 against weights of the same signs
            return row.sign()
        case "outlier":
            row[seed % width] = 1e4
        case "zeros":
            return torch.zeros(width)
        case "tiny":
            return row * 1e-37
        case "huge":
            return row * 1e30
        case "nan" | "infinity":
            row[seed % width] = float(kind)
        case "overflow":
            return torch.full((width,), 3e38)
    return row


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal except for a NaN's sign and payload, which IEEE 754 leaves open."""
    return torch.equal(
        a.nan_to_num(nan=0.5).view(torch.int32), b.nan_to_num(nan=0.5).view(torch.int32)
    ) and torch.equal(a.isnan(), b.isnan())


@needs_native
@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    bits=BITS,
    num_rows=st.integers(0, 70),
    in_features=IN_FEATURES,
    out_features=st.integers(1, 70),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_native_and_torch_give_equal_bits(
    data: st.DataObject,
    bits: int,
    num_rows: int,
    in_features: int,
    out_features: int,
    has_bias: bool,
    has_residual: bool,
    seed: int,
) -> None:
    """Quantized weights and outputs have the same bits, for any shape and any rows, NaN and overflow included."""
    weight_kinds = data.draw(st.lists(st.sampled_from(ROW_KINDS[:6]), min_size=1, max_size=4))
    row_kinds = data.draw(st.lists(st.sampled_from(ROW_KINDS), min_size=1, max_size=6))
    weight = torch.stack(
        [make_row(weight_kinds[row % len(weight_kinds)], in_features, seed + row) for row in range(out_features)]
    )
    rows = [make_row(row_kinds[row % len(row_kinds)], in_features, seed + 7 * row) for row in range(num_rows)]
    x = torch.stack(rows) if rows else torch.empty(0, in_features)
    bias = normal(out_features) if has_bias else None
    residual = normal(num_rows, out_features) if has_residual else None
    ours, ours_layer = make_layer("native", weight, bias, bits)
    torchs, torchs_layer = make_layer("torch", weight, bias, bits)
    for name in ("packed", "column_scales", "column_sums", "group_scales"):
        mine, other = getattr(ours, name), getattr(torchs, name)
        assert mine is None or torch.equal(mine, other), name
    assert same_bits(ours_layer(x, residual), torchs_layer(x, residual))


@kernels
@both_widths
def test_largest_sums_are_exact(kernel: str, bits: int) -> None:
    """If all of 30,000 products have the largest magnitude and the same sign, no bit of the sum is lost."""
    in_features = 29_999  # odd: no rotation, so inputs and weights stay at the ends of their range
    signs = normal(in_features).sign()
    quantized, layer = make_layer(kernel, torch.stack((signs, -signs)), None, bits)
    largest = expand(quantized).int()
    assert int(largest.abs().min()) == (127 if bits == 8 else 105)  # 7 * 15
    sums = (largest.long() * (127 * signs.long())).sum(1)
    row_scale = torch.tensor(1.0) / 127
    assert torch.equal(layer(signs[None])[0], sums.float() * row_scale * quantized.column_scales)


@kernels
@both_widths
@pytest.mark.parametrize("in_features", [96, 576, 1001])
def test_a_row_has_the_same_bits_in_any_batch(kernel: str, bits: int, in_features: int) -> None:
    """A row alone, in batches of every size, and on one thread or two, gives the same bits."""
    _, layer = make_layer(kernel, normal(333, in_features), normal(333), bits)
    x = normal(70, in_features, seed=1)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole = layer(x)
        for num_rows in range(1, 70):
            assert torch.equal(layer(x[70 - num_rows :]), whole[70 - num_rows :]), num_rows
        torch.set_num_threads(1)
        assert torch.equal(layer(x), whole)
    finally:
        torch.set_num_threads(threads)


@kernels
@pytest.mark.parametrize(("bits", "error"), [(8, 0.013), (4, 0.085)])
def test_outputs_are_close_to_float_ones(kernel: str, bits: int, error: float) -> None:
    """The relative error is that of rounding to 8 or 4 bits, outliers or not; bias and residual are added."""
    weight, bias, residual = normal(300, 576), normal(300, seed=1), normal(20, 300, seed=2)
    x = normal(20, 576, seed=3)
    x[:, 17] *= 50.0
    _, layer = make_layer(kernel, weight, bias, bits)
    found = layer(x, residual) - bias - residual
    expected = x @ weight.T
    assert float((found - expected).norm() / expected.norm()) < error


@kernels
@both_widths
def test_a_row_that_is_not_finite_harms_no_other(kernel: str, bits: int) -> None:
    """A NaN or an infinity affects only its own row, which becomes NaN; a row of zeros gives the bias."""
    bias = normal(40)
    _, layer = make_layer(kernel, normal(40, 64), bias, bits)
    x = normal(4, 64, seed=1)
    x[1, 3], x[2, 5], x[3] = torch.nan, -torch.inf, 0.0
    y = layer(x)
    assert y[1:3].isnan().all()
    assert torch.equal(y[3], bias)
    assert torch.equal(y[:1], layer(x[:1]))


@both_widths
@pytest.mark.parametrize("shape", [(1, 1), (16, 16), (17, 100), (70, 576)])
def test_weights_come_back(bits: int, shape: tuple[int, int]) -> None:
    """Expanded weights times their scales are the rotated weights, within half a step."""
    weight = normal(*shape)
    quantized, _ = make_layer("torch", weight, None, bits)
    expanded = expand(quantized)
    block = min(shape[1] & -shape[1], 512)
    rotated = weight.view(len(weight), -1, block)
    matrix = torch.ones(1, 1)
    while len(matrix) < block:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    rotated = (rotated @ matrix).flatten(1)
    step = quantized.column_scales[:, None] * block
    widest = 0.501 if bits == 8 else 8.5  # a group's integer scale is 15 at most, and may clip
    assert float(((rotated / step) - expanded).abs().max()) <= widest * (1 if bits == 8 else 2)
    assert torch.equal(quantized.column_sums, expanded.sum(1, dtype=torch.int32) * 128)


def test_weights_are_quantized_by_parts_alike() -> None:
    """A row of weights has the same bits in a large matrix, which is quantized by parts, as alone."""
    weight = normal(3000, 576)
    for bits in (8, 4):
        whole = expand(quantize(weight, None, bits))
        assert torch.equal(whole[2950:], expand(quantize(weight[2950:], None, bits)))


@both_widths
def test_other_float_types_are_read(bits: int) -> None:
    """Weights in bfloat16 give what their float32 values give."""
    weight = normal(20, 64).bfloat16()
    found, expected = quantize(weight, None, bits), quantize(weight.float(), None, bits)
    assert torch.equal(found.packed, expected.packed)
    assert torch.equal(found.column_scales, expected.column_scales)


@both_widths
def test_bad_weights_are_refused(bits: int) -> None:
    """NaN, infinity, more inputs than int32 can sum, and unknown widths are refused by name."""
    for value in (torch.nan, torch.inf):
        weight = normal(20, 64)
        weight[3, 4] = value
        with pytest.raises(ValueError, match="not finite"):
            quantize(weight, None, bits)
    with pytest.raises(ValueError, match=str(MAX_IN_FEATURES)):
        quantize(torch.zeros(1, MAX_IN_FEATURES + 1), None, bits)
    with pytest.raises(ValueError, match="5 bits"):
        quantize(normal(2, 2), None, 5)


@needs_native
@both_widths
def test_bad_inputs_are_refused(bits: int) -> None:
    """The operator reads nothing beyond a tensor, whatever shape or type it gets."""
    _, layer = make_layer("native", normal(20, 64), None, bits)
    with pytest.raises(ValueError, match="inputs of 60 numbers: the layer has 64"):
        layer(normal(3, 60))
    with pytest.raises(RuntimeError, match="x must be"):
        layer(normal(64))
    with pytest.raises(RuntimeError, match="x must be"):
        layer(normal(3, 64).double())
    with pytest.raises(RuntimeError, match="residual"):
        layer(normal(3, 64), normal(3, 21))
    with pytest.raises(RuntimeError, match="block"):
        torch.ops.actorserve.rotate_rows(normal(3, 64), 48)


@needs_native
@pytest.mark.skipif(native.isa() == "avx2", reason="these are the tests of AVX2 already")
def test_all_of_this_holds_on_avx2() -> None:
    """This file's tests pass with the kernels for CPUs that have only AVX2."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "ATEN_CPU_CAPABILITY": "avx2"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:]
