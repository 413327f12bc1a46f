"""Attention by Triton in the interpreter. A process of its own chooses the interpreter before the import.

The interpreter multiplies with numpy, and the last bits of numpy's products may depend on a row's place in the matrix.
So tests compare results with the reference within a tolerance. Tests that compare bits replace the product by one that
gives a row the same bits in any place, so that only the kernel could change them. On a GPU, ``test_triton_paged.py``
compares the bits of the real products.
"""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from actorserve.errors import SettingsError
from actorserve.model_files.description import DecoderConfig
from tests.workers.paged_requests import at_random, attend, dense, forever, in_chunks, make_request
from tests.workers.triton import by_place, interpreted, needs_interpreter, row_by_row, run_interpreted
from workers.attention import triton_paged
from workers.attention.triton_paged import TritonPagedAttention


@pytest.fixture
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the product that the interpreter uses."""
    monkeypatch.setattr(np, "matmul", request.param)


same_rows = pytest.mark.parametrize("products", [row_by_row], indirect=True)
other_rows = pytest.mark.parametrize("products", [by_place], indirect=True)


@needs_interpreter
def test_kernel_in_the_interpreter() -> None:
    """All interpreted tests of this file pass in a process whose Triton interprets."""
    run_interpreted(__file__)


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
@same_rows  # because the bits of the interpreter's own products depend on the machine's BLAS
@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("head_dim", [16, 80, 256])
def test_interpreted_kernel_is_tried_out(head_dim: int) -> None:
    """One token of any shape that the kernel takes can be tried out."""
    shapes = SimpleNamespace(num_heads=6, num_kv_heads=2, head_dim=head_dim)
    TritonPagedAttention(1.0).try_out(cast("DecoderConfig", shapes), torch.float32, torch.device("cpu"))


def by_size(a: Any, b: Any, dtype: Any) -> Any:
    """``a @ b`` with last bits that depend on the number of rows."""
    product = row_by_row(a, b, dtype)
    return np.nextafter(product, dtype.type(np.inf)) if len(a) >= 128 else product


SHAPES = cast("DecoderConfig", SimpleNamespace(num_heads=6, num_kv_heads=2, head_dim=16))


@interpreted
@pytest.mark.parametrize(("products", "tile"), [(row_by_row, 0), (by_size, 1)], indirect=["products"])
def test_interpreted_trial_takes_the_first_tile_with_the_bits_of_decode(products: None, tile: int) -> None:
    """A prefill tile that computes other bits than decode is left out, and the backend's name tells."""
    backend = TritonPagedAttention(1.0)
    backend.try_out(SHAPES, torch.float16, torch.device("cpu"))
    assert backend.name.endswith(f"tile={tile}")


@interpreted
@pytest.mark.usefixtures("products")
@other_rows
def test_interpreted_trial_refuses_a_machine_whose_prefill_has_other_bits() -> None:
    """If no prefill tile has the bits of decode, the engine does not start, and one line says why."""
    with pytest.raises(SettingsError, match="other bits in prefill than in decode"):
        TritonPagedAttention(1.0).try_out(SHAPES, torch.float32, torch.device("cpu"))


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


@interpreted
@pytest.mark.parametrize("window", [None, 300])
def test_interpreted_splits_equal_dense(window: int | None) -> None:
    """Contexts of several splits agree with dense float64 attention, in decode beside prefill."""
    lengths = (700, 256, 257, 530)
    requests = [make_request(n, 2, 2, 16, seed=n) for n in lengths]
    chunks = [(699, 700), (255, 256), (240, 257), (529, 530)]
    out = attend(TritonPagedAttention(0.25), requests, chunks, 16, seed=1, window=window)
    wanted = torch.cat([dense(r, window, 0.25)[start:end] for r, (start, end) in zip(requests, chunks, strict=True)])
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=5e-6)


@interpreted
@pytest.mark.usefixtures("products")
@same_rows
@pytest.mark.parametrize("window", [None, 300])
def test_interpreted_decode_has_the_bits_of_prefill(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several splits, decode alone, decode in a batch, prefill, and decode without scratch give equal bits."""
    request, other = make_request(532, 1, 3, 16, seed=5), make_request(290, 1, 3, 16, seed=6)
    backend = TritonPagedAttention(0.25)
    start = 509
    whole = attend(backend, [request], [(start, 532)], 16, seed=1, window=window)
    for end in (510, 512, 513, 532):
        chunk, wanted = (end - 1, end), whole[end - 1 - start : end - start]
        assert torch.equal(attend(backend, [request], [chunk], 16, seed=2, window=window), wanted)
        batch = [other, request, other], [(289, 290), chunk, (280, 290)]
        assert torch.equal(attend(backend, *batch, 16, seed=3, window=window)[1:2], wanted)
        with monkeypatch.context() as patch:
            patch.setattr(triton_paged, "_SCRATCH_BYTES", 0)
            assert torch.equal(attend(backend, *batch, 16, seed=3, window=window)[1:2], wanted)


@interpreted
@pytest.mark.usefixtures("products")
@same_rows
def test_interpreted_decode_of_more_requests_than_are_read_at_once() -> None:
    """A program finds its splits among more requests than it reads at once; requests of a chunk lie between them."""
    request, long = make_request(20, 1, 1, 16, seed=5), make_request(300, 1, 1, 16, seed=6)
    backend = TritonPagedAttention(0.25)
    alone = attend(backend, [request], [(15, 20)], 16, seed=1)
    requests = ([request] * 70 + [long]) * 2
    chunks = ([(19, 20), (15, 20)] * 35 + [(299, 300)]) * 2
    out = attend(backend, requests, chunks, 16, seed=2)
    wanted = torch.cat([alone[4:], alone] * 35)
    assert torch.equal(out[: len(wanted)], wanted)
    assert torch.equal(out[len(wanted) + 1 : -1], wanted)
    assert torch.equal(out[-1:], attend(backend, [long], [(299, 300)], 16, seed=3))
