"""Attention on CPUs, native and in torch: close to float64, and the same bits in any batch."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from actorserve.core.messages import StepPlan
from tests.workers.paged_requests import Chunk, at_random, attend, dense, forever, in_chunks, make_request, transpose
from workers import native
from workers.attention import Attention
from workers.attention.native import NativePagedAttention
from workers.attention.tiled import TiledAttention
from workers.batch import make_batch
from workers.kv.cache import transposed

CPU = torch.device("cpu")
LOWERED = os.environ.get("ATEN_CPU_CAPABILITY") == "avx2"
BACKENDS = ("native", "tiled")
SHAPES = [(3, 3, 64), (1, 1, 2), (2, 4, 80), (1, 17, 128), (2, 2, 256), (1, 97, 34), (4, 1, 96), (2, 5, 18)]
"""KV heads, heads per KV head, head_dim."""

needs_native = pytest.mark.skipif(not native.load(), reason=native.describe())


def make_backend(name: str, num_kv_heads: int, group_heads: int, head_dim: int, scale: float) -> Attention:
    if name == "tiled":
        return TiledAttention(num_kv_heads * group_heads, num_kv_heads, head_dim, CPU, scale)
    if not native.load():
        pytest.skip(native.describe())
    return NativePagedAttention(scale)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "num_kv_heads", "group_heads", "head_dim"),
    [("native", *shape) for shape in SHAPES] + [("tiled", *shape) for shape in SHAPES[:3]],
)
def test_equals_dense(name: str, num_kv_heads: int, group_heads: int, head_dim: int, kv_dtype: torch.dtype) -> None:
    """A mixed step of chunks and decode tokens agrees with float64, with and without a window, for any scale."""
    chunks = [(0, 1), (7, 40), (332, 333), (100, 530)]
    requests = [make_request(end, num_kv_heads, group_heads, head_dim, end, kv_dtype=kv_dtype) for _, end in chunks]
    for window, scale, tokens_per_block in ((None, head_dim**-0.5, 16), (300, 0.05, 33), (7, 0.2, 1)):
        out = attend(
            make_backend(name, num_kv_heads, group_heads, head_dim, scale),
            requests,
            chunks,
            tokens_per_block,
            1,
            window,
        )
        wanted = [dense(r, window, scale)[start:end] for r, (start, end) in zip(requests, chunks, strict=True)]
        torch.testing.assert_close(out.double(), torch.cat(wanted), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 40, 256])
def test_bits_do_not_depend_on_chunks_or_blocks(name: str, kv_dtype: torch.dtype, window: int | None) -> None:
    """Prefill at once, random chunks and token-by-token decode, at any block size, give equal bits."""
    request = make_request(600, 2, 3, 64, seed=5, kv_dtype=kv_dtype)
    backend = make_backend(name, 2, 3, 64, 0.125)
    whole = in_chunks(backend, request, forever(600), 16, window)
    assert torch.equal(in_chunks(backend, request, forever(1), 16, window), whole)
    assert torch.equal(in_chunks(backend, request, at_random(1), 64, window), whole)
    assert torch.equal(in_chunks(backend, request, at_random(2), 7, window), whole)
    assert torch.equal(in_chunks(backend, request, at_random(3), 24, window), whole)


@st.composite
def steps(draw: st.DrawFn) -> list[Chunk]:
    chunks = []
    for _ in range(draw(st.integers(1, 6))):
        end = draw(st.integers(1, 530))
        chunks.append((draw(st.sampled_from([0, end // 2, end - 1])), end))
    return chunks


@needs_native
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    chunks=steps(),
    shape=st.sampled_from(SHAPES),
    tokens_per_block=st.integers(1, 70),
    window=st.none() | st.integers(1, 600),
    kv_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_native_bits_do_not_depend_on_batch_mates_or_threads(
    chunks: list[Chunk], shape: tuple[int, int, int], tokens_per_block: int, window: int | None, kv_dtype: torch.dtype
) -> None:
    """Each chunk's result has equal bits alone and in its batch, on one thread and on two."""
    requests = [make_request(end, *shape, seed=number, kv_dtype=kv_dtype) for number, (_, end) in enumerate(chunks)]
    backend = NativePagedAttention(shape[2] ** -0.5)
    with threads(2):
        out = attend(backend, requests, chunks, tokens_per_block, 1, window)
        mixed = [
            attend(backend, [r], [chunk], 16, seed=2, window=window) for r, chunk in zip(requests, chunks, strict=True)
        ]
    with threads(1):
        alone = [
            attend(backend, [r], [chunk], tokens_per_block, seed=3, window=window)
            for r, chunk in zip(requests, chunks, strict=True)
        ]
    assert torch.equal(out, torch.cat(alone))
    assert torch.equal(out, torch.cat(mixed))


@needs_native
def test_native_takes_bfloat16_queries_and_slices() -> None:
    """bfloat16 queries are computed in float32 and rounded once; a query that is a slice of a wider tensor is read."""
    request = make_request(50, 2, 3, 64, seed=1, dtype=torch.bfloat16)
    backend = NativePagedAttention(0.125)
    out = attend(backend, [request], [(0, 50)], 16, seed=1)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), dense(request), rtol=1e-2, atol=1e-2)
    batch = make_batch(StepPlan(0, ("a",), (0,), ((1, 2),), ((0,),), (False,)), 16, CPU)
    wide, pool = torch.randn(2, 9, 64), torch.randn(2, 16, 64)
    keys = transpose(pool.clone(), 16)
    expected = backend(wide[:, :6].contiguous(), keys, pool, batch)
    assert torch.equal(backend(wide[:, :6], keys, pool, batch), expected)


@needs_native
@pytest.mark.parametrize(
    ("query", "pool", "blocks", "message"),
    [
        ((2, 4, 31), (2, 32, 31), (0,), "head_dim must be even"),
        ((2, 4, 258), (2, 32, 258), (0,), "head_dim must be even"),
        ((2, 5, 32), (2, 32, 32), (0,), "to fit query"),
        ((2, 4, 32), (2, 32, 64), (0,), "to fit query"),
        ((2, 4, 32), (2, 32, 32), (2,), "block 2 is outside"),
        ((3, 4, 32), (2, 32, 32), (0,), "query_starts"),
    ],
)
def test_native_refuses_what_does_not_fit(
    query: tuple[int, ...], pool: tuple[int, ...], blocks: tuple[int, ...], message: str
) -> None:
    """Shapes and blocks that do not fit raise, before anything outside the pool is read."""
    batch = make_batch(StepPlan(0, ("a",), (0,), ((1, 2),), (blocks,), (False,)), 16, CPU)
    values = torch.zeros(pool)
    with pytest.raises(RuntimeError, match=message):
        NativePagedAttention(1.0)(torch.zeros(query), transposed(values, 16), values, batch)


@needs_native
def test_native_refuses_another_layout() -> None:
    """Keys that are not transposed, and values that are, raise an error instead of being misread."""
    batch = make_batch(StepPlan(0, ("a",), (0,), ((1, 2),), ((0,),), (False,)), 16, CPU)
    values, backend = torch.zeros(2, 32, 32), NativePagedAttention(1.0)
    for keys, some_values in (
        (values, values),
        (transposed(values, 16), transposed(values, 16)),
        (transposed(values, 16), values[:, :16]),
        (transposed(values, 16).transpose(2, 3).contiguous().transpose(2, 3), values),
        (transposed(values, 16), values.bfloat16()),
    ):
        with pytest.raises(RuntimeError, match=r"must (both )?be"):
            backend(torch.zeros(2, 4, 32), keys, some_values, batch)


@needs_native
@pytest.mark.skipif(LOWERED or native.isa() == "avx2", reason="these are AVX2's kernels already")
def test_native_on_avx2() -> None:
    """The native tests of this file pass with the kernels for AVX2, too."""
    command = [sys.executable, "-m", "pytest", "-q", "-k", "native", __file__]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
