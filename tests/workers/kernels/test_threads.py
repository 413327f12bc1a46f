"""The native kernels' own threads: the same bits as OpenMP's, whatever their number and whichever threads call."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from workers import native

pytestmark = pytest.mark.skipif(not native.load(), reason=native.describe())
X = torch.randn(333, 960, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    native.use_own_threads(True)
    yield
    native.use_own_threads(False)
    torch.set_num_threads(before)


def compute(x: Tensor = X) -> Tensor:
    y: Tensor = torch.ops.actorserve.softmax(torch.ops.actorserve.gated(x, True))
    return y


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_every_row_is_computed_once(num_threads: int) -> None:
    """The rows' bits are those of OpenMP's threads, in thousands of loops, long ones and short ones."""
    native.use_own_threads(False)
    wanted = compute()
    native.use_own_threads(True)
    torch.set_num_threads(num_threads)
    for number in range(1500):
        rows = 1 + number * 7 % len(X)
        assert torch.equal(compute(X[:rows]), wanted[:rows])


def test_threads_may_call_at_once() -> None:
    """Loops that begin at the same time in several threads of a process all give the right bits."""
    torch.set_num_threads(4)
    wanted = compute()
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(found, wanted) for found in pool.map(lambda _: compute(), range(400)))


def test_a_sleeping_helper_wakes() -> None:
    """Loops after a pause that sends the helpers to sleep give the right bits, too."""
    torch.set_num_threads(2)
    wanted = compute()
    for _ in range(20):
        time.sleep(0.01)  # helpers wait for a millisecond
        assert torch.equal(compute(), wanted)
