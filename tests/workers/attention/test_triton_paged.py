"""Attention by Triton says what it lacks. On a GPU it agrees with the reference and keeps its bits in any batch."""

import random
import subprocess
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from actorserve.core.messages import StepPlan
from actorserve.errors import SettingsError
from actorserve.model_files.description import DecoderConfig
from tests.workers.paged_requests import at_random, attend, dense, forever, in_chunks, make_request
from tests.workers.triton import HAS_TRITON, needs_triton, on_cuda
from workers.attention.triton_paged import TritonPagedAttention
from workers.batch import Batch, make_batch

SHAPES = cast("DecoderConfig", SimpleNamespace(num_heads=6, num_kv_heads=2, head_dim=64))


@pytest.mark.skipif(HAS_TRITON, reason="triton is installed")
def test_without_triton_the_backend_says_what_is_missing() -> None:
    """Without triton the module can be imported, and making the backend raises an error that names the package."""
    with pytest.raises(SettingsError, match="triton"):
        TritonPagedAttention(1.0)


@needs_triton
def test_what_a_kernel_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the kernel cannot be built, one line names the packages, before weights are loaded."""

    class Kernel:
        def __getitem__(self, grid: object) -> object:
            raise subprocess.CalledProcessError(1, ["gcc", "main.c"])

    attention = TritonPagedAttention(1.0)
    monkeypatch.setattr(attention, "_kernels", SimpleNamespace(prefill=Kernel(), decode_splits=Kernel()))
    monkeypatch.setattr(attention, "_interpreted", True)
    with pytest.raises(SettingsError, match=r"apt install gcc python3-dev.*gcc"):
        attention.try_out(SHAPES, torch.float32, torch.device("cpu"))


@needs_triton
@pytest.mark.parametrize(
    ("query", "keys", "message"),
    [
        (torch.zeros(2, 4, 24), torch.zeros(2, 8, 24), "multiple of 16"),
        (torch.zeros(2, 4, 272), torch.zeros(2, 8, 272), "up to 256"),
        (torch.zeros(2, 5, 32), torch.zeros(2, 8, 32), "do not fit"),
        (torch.zeros(2, 4, 32), torch.zeros(2, 8, 64)[..., ::2], "contiguous"),
        (torch.zeros(2, 4, 32, dtype=torch.float64), torch.zeros(2, 8, 32, dtype=torch.float64), "bfloat16 or float16"),
    ],
)
def test_refuses_what_the_kernel_does_not_take(query: Tensor, keys: Tensor, message: str) -> None:
    """Shapes, strides and types that the kernel does not take raise a ValueError that says which."""
    batch = make_batch(StepPlan(0, ("a",), (0,), ((1, 2),), ((0,),), (False,)), 16, torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        TritonPagedAttention(1.0)(query, keys, keys, batch)


@on_cuda
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize(
    ("num_kv_heads", "group_heads", "head_dim", "tokens_per_block"),
    [(3, 3, 64, 16), (8, 4, 128, 16), (2, 4, 48, 5), (1, 17, 32, 64), (2, 8, 256, 32), (4, 1, 80, 1)],
)
def test_cuda_equals_dense(
    num_kv_heads: int, group_heads: int, head_dim: int, tokens_per_block: int, dtype: torch.dtype, tolerance: float
) -> None:
    """On CUDA a mixed step agrees with dense float64 attention, within the type's rounding."""
    lengths = (1, 40, 333, 700)
    requests = [make_request(n, num_kv_heads, group_heads, head_dim, n, dtype, device="cuda") for n in lengths]
    chunks = [(0, 1), (7, 40), (332, 333), (100, 700)]
    out = attend(TritonPagedAttention(head_dim**-0.5), requests, chunks, tokens_per_block, seed=1)
    wanted = torch.cat([dense(r)[start:end] for r, (start, end) in zip(requests, chunks, strict=True)])
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)


@on_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_kv_heads", "group_heads", "head_dim"), [(3, 3, 64), (2, 4, 128), (1, 5, 48), (1, 2, 256), (1, 70, 64)]
)
def test_cuda_bits_do_not_depend_on_chunks_or_blocks(
    num_kv_heads: int, group_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """On CUDA prefill at once, random chunks and decode, at any block size, give equal bits."""
    request = make_request(300, num_kv_heads, group_heads, head_dim, 5, dtype, device="cuda")
    backend = TritonPagedAttention(head_dim**-0.5)
    whole = in_chunks(backend, request, forever(300), 16)
    assert torch.equal(in_chunks(backend, request, forever(1), 16), whole)
    assert torch.equal(in_chunks(backend, request, at_random(1), 64), whole)
    assert torch.equal(in_chunks(backend, request, at_random(2), 1), whole)
    assert torch.equal(in_chunks(backend, request, at_random(3), 7), whole)


@on_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_bits_do_not_depend_on_batch_mates(dtype: torch.dtype) -> None:
    """On CUDA a chunk's result has equal bits alone and at any place in batches of up to 32."""
    source = random.Random(9)
    requests = [make_request(source.randint(1, 400), 2, 3, 64, seed, dtype, device="cuda") for seed in range(32)]
    chunks = [(source.choice((0, r.num_tokens // 2, r.num_tokens - 1)), r.num_tokens) for r in requests]
    backend = TritonPagedAttention(64**-0.5)
    alone = [attend(backend, [r], [chunk], 16, seed=3) for r, chunk in zip(requests, chunks, strict=True)]
    for size in (2, 3, 16, 32):
        order = source.sample(range(32), size)
        out = attend(backend, [requests[i] for i in order], [chunks[i] for i in order], 16, seed=size)
        assert torch.equal(out, torch.cat([alone[i] for i in order]))


@on_cuda
@pytest.mark.parametrize("window", [None, 700])
def test_cuda_long_decode_has_the_bits_of_prefill(window: int | None) -> None:
    """On CUDA decode over many splits has the bits of prefill, alone and beside a prefill."""
    request = make_request(9000, 2, 4, 128, 5, torch.bfloat16, device="cuda")
    backend = TritonPagedAttention(128**-0.5)
    whole = attend(backend, [request], [(8000, 9000)], 16, seed=1, window=window)
    for end in (8001, 8192, 8193, 8500, 9000):
        wanted = whole[end - 8001 : end - 8000]
        assert torch.equal(attend(backend, [request], [(end - 1, end)], 16, seed=2, window=window), wanted)
        both = attend(backend, [request, request], [(100, 400), (end - 1, end)], 16, seed=3, window=window)
        assert torch.equal(both[-1:], wanted)


@on_cuda
def test_cuda_graph_replays_with_longer_contexts() -> None:
    """On CUDA a captured decode follows the lengths that lie in the batch's tensors at its replay."""
    keys, values = torch.randn((2, 2, 4096, 64), device="cuda", dtype=torch.bfloat16)
    query = torch.randn((2, 8, 64), device="cuda", dtype=torch.bfloat16)
    tables = tuple(tuple(range(at, at + 128)) for at in (0, 128))

    def batch_of(*starts: int) -> Batch:
        return make_batch(StepPlan(0, ("a", "b"), starts, ((1,), (1,)), tables, (True, True)), 16, query.device)

    backend = TritonPagedAttention(0.125)
    batch = batch_of(10, 20)
    backend(query, keys, values, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend(query, keys, values, batch)
    later = batch_of(1999, 700)
    batch.context_lens.copy_(later.context_lens)
    graph.replay()
    assert torch.equal(out, backend(query, keys, values, later))
