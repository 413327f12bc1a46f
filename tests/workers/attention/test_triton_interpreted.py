"""The Triton kernel in Triton's interpreter. A process of its own chooses the interpreter before the import.

The interpreter multiplies with numpy, and the last bits of numpy's products may depend on a row's place in the matrix.
So tests compare results with the reference within a tolerance. Tests that compare bits replace the product by one that
gives a row the same bits in any place, so that only the kernel could change them. On a GPU, ``test_triton_paged.py``
compares the bits of the real products.
"""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from actorserve.model_files.description import DecoderConfig
from tests.workers.paged_requests import at_random, attend, dense, forever, in_chunks, make_request
from tests.workers.triton import HAS_TRITON, INTERPRETED, VERSION, row_by_row
from workers.attention.triton_paged import TritonPagedAttention

interpreted = pytest.mark.skipif(not (HAS_TRITON and INTERPRETED), reason="run by test_kernel_in_the_interpreter")


def by_place(a: Any, b: Any, dtype: Any) -> Any:
    """``a @ b`` with last bits that depend on a row's place, more than in any BLAS."""
    product = row_by_row(a, b, dtype)
    product[1::2] = np.nextafter(product[1::2], dtype.type(np.inf))
    return product


@pytest.fixture
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the product that the interpreter uses."""
    monkeypatch.setattr(np, "matmul", request.param)


same_rows = pytest.mark.parametrize("products", [row_by_row], indirect=True)
other_rows = pytest.mark.parametrize("products", [by_place], indirect=True)


@pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="needs the package triton, and a process that compiles")
@pytest.mark.skipif(VERSION < (3, 7), reason="before 3.7 Triton's interpreter cannot count loops with today's NumPy")
def test_kernel_in_the_interpreter() -> None:
    """All interpreted tests of this file pass in a process whose Triton interprets."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "interpreted", __file__]
    done = subprocess.run(
        command, check=False, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


@interpreted
@pytest.mark.parametrize(
    ("num_kv_heads", "group_heads", "head_dim", "tokens_per_block"),
    [(1, 1, 16, 1), (3, 3, 64, 16), (2, 4, 48, 5), (1, 17, 32, 64), (2, 2, 80, 7), (1, 8, 256, 16)],
)
def test_interpreted_equals_dense(num_kv_heads: int, group_heads: int, head_dim: int, tokens_per_block: int) -> None:
    """A mixed step of prefill chunks and decode tokens agrees with dense float64 attention."""
    lengths = (1, 40, 33, 70)
    requests = [make_request(n, num_kv_heads, group_heads, head_dim, seed=n) for n in lengths]
    chunks = [(0, 1), (7, 40), (32, 33), (0, 70)]
    out = attend(TritonPagedAttention(head_dim**-0.5), requests, chunks, tokens_per_block, seed=1)
    wanted = torch.cat([dense(r)[start:end] for r, (start, end) in zip(requests, chunks, strict=True)])
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=5e-6)


@interpreted
@pytest.mark.parametrize("head_dim", [16, 80, 256])
def test_interpreted_kernel_is_tried_out(head_dim: int) -> None:
    """One token of any shape that the kernel takes can be tried out."""
    shapes = SimpleNamespace(num_heads=6, num_kv_heads=2, head_dim=head_dim)
    TritonPagedAttention(1.0).try_out(cast("DecoderConfig", shapes), torch.float32, torch.device("cpu"))


@interpreted
@pytest.mark.parametrize("tokens_per_block", [1, 3, 16])
def test_interpreted_chunks_equal_dense(tokens_per_block: int) -> None:
    """Random chunks and token-by-token decode, at any block size, agree with dense float64 attention."""
    check_chunks(tokens_per_block)


@interpreted
@pytest.mark.usefixtures("products")
@other_rows
def test_interpreted_chunks_equal_dense_on_any_cpu() -> None:
    """Chunks agree with the reference also if a row's last bits depend on its place; then bits depend on chunks."""
    whole, one_by_one = check_chunks(16)
    assert not torch.equal(whole, one_by_one)


def check_chunks(tokens_per_block: int) -> tuple[Tensor, Tensor]:
    """The results of prefill at once and of token-by-token decode."""
    request = make_request(36, 1, 5, 48, seed=5)
    backend, wanted = TritonPagedAttention(48**-0.5), dense(request)
    results = [
        in_chunks(backend, request, sizes, tokens_per_block) for sizes in (forever(40), forever(1), at_random(1))
    ]
    for found in results:
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=5e-6)
    return results[0], results[1]


@interpreted
@pytest.mark.parametrize("window", [1, 20, 64])
def test_interpreted_window_equals_dense(window: int) -> None:
    """With a window, a token sees that many keys and no more, in any chunks."""
    request = make_request(80, 1, 3, 32, seed=7)
    backend, wanted = TritonPagedAttention(0.3), dense(request, window, scale=0.3)
    for sizes in (forever(80), at_random(1)):
        found = in_chunks(backend, request, sizes, 16, window)
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=5e-6)


@interpreted
@pytest.mark.usefixtures("products")
@same_rows
@pytest.mark.parametrize(("num_kv_heads", "group_heads", "head_dim"), [(1, 3, 64), (1, 5, 48)])
def test_interpreted_bits_do_not_depend_on_chunks_or_blocks(num_kv_heads: int, group_heads: int, head_dim: int) -> None:
    """Prefill at once, random chunks and token-by-token decode, at any block size, give equal bits."""
    request = make_request(40, num_kv_heads, group_heads, head_dim, seed=5)
    backend = TritonPagedAttention(head_dim**-0.5)
    whole = in_chunks(backend, request, forever(40), 16)
    assert torch.equal(in_chunks(backend, request, forever(1), 3), whole)
    assert torch.equal(in_chunks(backend, request, at_random(1), 64), whole)
    assert torch.equal(in_chunks(backend, request, at_random(2), 1), whole)


@interpreted
@pytest.mark.usefixtures("products")
@same_rows
@pytest.mark.parametrize("window", [1, 10, 35])
def test_interpreted_bits_do_not_depend_on_chunks_within_a_window(window: int) -> None:
    """With a window, prefill at once, random chunks and decode give equal bits."""
    request = make_request(50, 1, 3, 32, seed=7)
    backend = TritonPagedAttention(0.3)
    whole = in_chunks(backend, request, forever(50), 16, window)
    assert torch.equal(in_chunks(backend, request, forever(1), 16, window), whole)
    assert torch.equal(in_chunks(backend, request, at_random(1), 3, window), whole)


@interpreted
@pytest.mark.usefixtures("products")
@same_rows
def test_interpreted_bits_do_not_depend_on_batch_mates() -> None:
    """A chunk's result has equal bits alone and at any place in a batch."""
    requests = [make_request(n, 1, 3, 64, seed=n) for n in (40, 1, 36, 20)]
    chunks = [(20, 40), (0, 1), (35, 36), (0, 20)]
    backend = TritonPagedAttention(64**-0.5)
    alone = [attend(backend, [r], [chunk], 16, seed=3) for r, chunk in zip(requests, chunks, strict=True)]
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 0)):
        out = attend(backend, [requests[i] for i in order], [chunks[i] for i in order], 16, seed=4)
        assert torch.equal(out, torch.cat([alone[i] for i in order]))
