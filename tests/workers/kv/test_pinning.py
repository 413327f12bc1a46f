"""A pool is pinned in chunks, and is as large as what the driver pins."""

import gc
import logging
import mmap

import pytest
import torch

from tests.workers.kv.small_cache import CONFIG
from workers.kv import pinning
from workers.kv.cache import KVCache
from workers.kv.pinning import CudaPinner, PinnedPool
from workers.kv.shared_memory import attach
from workers.kv.swap import HostPool

PAGE = mmap.PAGESIZE


class FakeDriver:
    """Pins up to ``most_bytes``, as one whose process may lock no more, and complains as CUDA does."""

    def __init__(self, most_bytes: int = 2**40) -> None:
        self._most_bytes = most_bytes
        self.pinned: dict[int, int] = {}

    def pin(self, address: int, num_bytes: int) -> str:
        first, end = address // PAGE, -(-(address + num_bytes) // PAGE)
        for other, size in self.pinned.items():
            if first < -(-(other + size) // PAGE) and other // PAGE < end:
                return "part or all of the requested memory range is already mapped"
        if sum(self.pinned.values()) + num_bytes > self._most_bytes:
            return "out of memory"
        self.pinned[address] = num_bytes
        return ""

    def unpin(self, address: int) -> None:
        del self.pinned[address]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(pinning, "_CHUNK_BYTES", 4 * PAGE)
    caplog.set_level(logging.INFO, logger="workers")


@pytest.mark.parametrize("block_bytes", [PAGE, 2 * PAGE, PAGE // 2, 3 * PAGE // 4, 5 * PAGE])
@pytest.mark.parametrize("num_blocks", [1, 4, 23])
def test_all_blocks_are_pinned_in_chunks_that_share_no_page(
    block_bytes: int, num_blocks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Chunks of whole blocks cover the pool, and the progress grows to 1. The log names the size and the time."""
    driver, told = FakeDriver(), list[float]()
    pool = PinnedPool(num_blocks, block_bytes, driver, told.append)
    assert pool.num_blocks == num_blocks
    assert pool.memory is not None
    base = torch.frombuffer(pool.memory.buffer, dtype=torch.uint8).data_ptr()
    at = base
    for address, size in driver.pinned.items():
        assert address == at
        assert (address - base) % (pool.blocks_per_chunk * block_bytes) == 0
        at += size
    assert at == base + num_blocks * block_bytes
    assert told == sorted(told)
    assert len(told) == len(driver.pinned)
    assert told[-1] == 1.0
    (said,) = caplog.messages
    assert said.startswith("pinned ")


def test_a_pool_shrinks_to_what_can_be_pinned(caplog: pytest.LogCaptureFixture) -> None:
    """If the driver refuses a chunk, the pool is what was pinned before, and one warning says how much, and why."""
    driver = FakeDriver(most_bytes=11 * PAGE)
    pool = PinnedPool(100, PAGE, driver, lambda _: None)
    assert pool.num_blocks == 8
    assert sum(driver.pinned.values()) == 8 * PAGE
    assert pool.memory is not None
    assert len(attach(pool.memory.shown, 8 * PAGE)) == 8 * PAGE  # other workers map what the pool says
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "(out of memory)" in record.getMessage()
    assert "workers.host_kv_bytes" in record.getMessage()


def test_a_driver_that_pins_nothing_leaves_no_pool(caplog: pytest.LogCaptureFixture) -> None:
    """If nothing can be pinned, there is no pool and a warning, and the engine goes on without swapping."""
    pool = PinnedPool(100, PAGE, FakeDriver(most_bytes=0), lambda _: None)
    assert (pool.num_blocks, pool.memory) == (0, None)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_pool_that_nothing_wants_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    """A pool of 0 blocks pins nothing and says nothing."""
    pool = PinnedPool(0, PAGE, FakeDriver(), lambda _: None)
    assert (pool.num_blocks, pool.memory) == (0, None)
    assert caplog.messages == []


def test_memory_is_unpinned_with_its_pool() -> None:
    """When the pool is not used any more, all of its chunks are unpinned."""
    driver = FakeDriver()
    pool = PinnedPool(10, PAGE, driver, lambda _: None)
    assert driver.pinned
    del pool
    gc.collect()
    assert not driver.pinned


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_cuda
def test_blocks_come_back_from_pinned_chunks() -> None:
    """On a GPU, blocks go to a pool of several pinned chunks and come back, in copies that reach over the borders."""
    cuda = torch.device("cuda")
    cache = KVCache(CONFIG, 64, 16, torch.float32, cuda)
    cache.pool.copy_(torch.randn(cache.pool.shape, generator=torch.Generator().manual_seed(0)))
    pool = HostPool(cache, 48)
    assert pool.num_blocks == 48
    before = cache.blocks.clone()
    pool.copy_out(range(10, 58), range(48))
    cache.pool.zero_()
    pool.copy_in(range(48), range(48))
    assert torch.equal(cache.blocks[:48], before[10:58])


@pytest.mark.gpu
@needs_cuda
def test_a_failed_pin_leaves_no_error_behind() -> None:
    """Pinning memory twice fails with CUDA's reason, and the next kernel does not report that error."""
    cuda = torch.device("cuda")
    memory = torch.zeros(4 * PAGE, dtype=torch.uint8)
    pinner = CudaPinner(cuda)
    assert pinner.pin(memory.data_ptr(), memory.nbytes) == ""
    assert "already" in pinner.pin(memory.data_ptr(), memory.nbytes)
    assert torch.ones(3, device=cuda).sum().item() == 3
    pinner.unpin(memory.data_ptr())
