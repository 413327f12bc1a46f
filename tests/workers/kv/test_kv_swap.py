"""The named blocks, and no others, go to the host's pool and come back unchanged."""

import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st

from actorserve.core.messages import StepPlan
from tests.workers.kv.small_cache import CONFIG, CPU, needs_native
from workers.batch import make_batch
from workers.kv.cache import KVCache
from workers.kv.staged_copier import StagedCopier, runs
from workers.kv.swap import HostPool

NUM_BLOCKS = 6
TOKENS_PER_BLOCK = 4


def filled_cache(dtype: torch.dtype = torch.bfloat16, tokens_per_block: int = TOKENS_PER_BLOCK) -> KVCache:
    """A pool of random bytes, including numbers that are not finite."""
    cache = KVCache(CONFIG, NUM_BLOCKS, tokens_per_block, dtype, CPU)
    generator = torch.Generator().manual_seed(0)
    cache.pool.view(torch.uint8).copy_(torch.randint(256, cache.pool.view(torch.uint8).shape, generator=generator))
    return cache


def test_blocks_are_whole_and_disjoint() -> None:
    """A block's bytes are its tokens' keys and values in all layers, and nothing else."""
    cache = filled_cache(torch.float32)
    _, num_pieces, piece_bytes = cache.blocks.shape
    assert num_pieces * piece_bytes == cache.pool.nbytes // NUM_BLOCKS
    before = cache.pool.clone()
    cache.blocks[2] = 0
    changed = (cache.pool.view(torch.int32) != before.view(torch.int32)).flatten(0, 2).any(0).any(-1)
    assert changed.nonzero().flatten().tolist() == list(range(2 * TOKENS_PER_BLOCK, 3 * TOKENS_PER_BLOCK))


@pytest.mark.parametrize("tokens_per_block", [1, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_come_back_as_they_were(dtype: torch.dtype, tokens_per_block: int) -> None:
    """A block copied out and in elsewhere has the same bytes; other blocks, on device and host, do not change."""
    cache = filled_cache(dtype, tokens_per_block)
    pool = HostPool(cache, 4)
    pool.blocks.fill_(7)
    before = cache.blocks.clone()
    pool.copy_out((5, 0), (1, 3))
    assert (pool.blocks[0] == 7).all()
    assert (pool.blocks[2] == 7).all()
    assert torch.equal(cache.blocks, before)
    pool.copy_in((3, 1), (4, 1))
    assert torch.equal(cache.blocks, before[[0, 5, 2, 3, 0, 5]])


@needs_native
def test_transposed_keys_are_copied_with_their_block() -> None:
    """A block also holds its keys if they are transposed."""
    cache = KVCache(CONFIG, NUM_BLOCKS, TOKENS_PER_BLOCK, torch.float32, CPU, keys_transposed=True)
    cache.pool.zero_()
    plan = StepPlan(0, ("a",), (0,), ((1,) * 3,), ((4,),), (False,))
    new = torch.randn(3, CONFIG.num_kv_heads, CONFIG.head_dim, generator=torch.Generator().manual_seed(0))
    cache.write(1, make_batch(plan, TOKENS_PER_BLOCK, CPU), new, 2 * new)
    pool = HostPool(cache, 1)
    pool.copy_out((4,), (0,))
    pool.copy_in((0,), (2,))
    keys, values = cache.layers[1]
    assert keys[:, 4].any()
    assert torch.equal(keys[:, 2], keys[:, 4])
    slots = values.view(CONFIG.num_kv_heads, NUM_BLOCKS, TOKENS_PER_BLOCK, CONFIG.head_dim)
    assert torch.equal(slots[:, 2], slots[:, 4])


def test_written_blocks_are_counted_once() -> None:
    """A host block that is written again counts once, and one that is only read does not count."""
    pool = HostPool(filled_cache(), 4)
    pool.copy_out((0, 1), (2, 3))
    pool.copy_out((0,), (3,))
    pool.copy_in((0,), (5,))
    assert pool.num_written_blocks == 2


@pytest.mark.parametrize(
    ("device_blocks", "host_blocks", "message"),
    [
        ((0, 1), (0,), "2 blocks on the device and 1 on the host"),
        ((NUM_BLOCKS,), (0,), "device blocks"),
        ((-1,), (0,), "device blocks"),
        ((0,), (4,), "host blocks"),
        ((0,), (-1,), "host blocks"),
        ((1, 1), (0, 1), "device block twice"),
        ((0, 1), (2, 2), "host block twice"),
    ],
)
def test_blocks_that_do_not_exist_are_refused(
    device_blocks: tuple[int, ...], host_blocks: tuple[int, ...], message: str
) -> None:
    """A copy that names wrong blocks raises in both directions, and nothing is copied."""
    cache = filled_cache()
    pool, before = HostPool(cache, 4), cache.blocks.clone()
    pool.blocks.fill_(7)
    with pytest.raises(ValueError, match=message):
        pool.copy_out(device_blocks, host_blocks)
    with pytest.raises(ValueError, match=message):
        pool.copy_in(host_blocks, device_blocks)
    assert (pool.blocks == 7).all()
    assert torch.equal(cache.blocks, before)


def test_an_empty_pool_takes_nothing() -> None:
    """A pool of 0 blocks holds no memory, and refuses every block."""
    pool = HostPool(filled_cache(), 0)
    assert pool.blocks.nbytes == 0
    with pytest.raises(ValueError, match="there are 0 blocks"):
        pool.copy_out((0,), (0,))


def test_host_memory_is_taken_as_it_is_written() -> None:
    """Reserving a pool touches no page; copying out makes only the copied bytes resident."""
    program = (
        "import torch; from workers.kv.shared_memory import resident_shared_bytes\n"
        "from tests.workers.kv.small_cache import CONFIG; from workers.kv.cache import KVCache\n"
        "from workers.kv.swap import HostPool\n"
        "cache = KVCache(CONFIG, 2000, 16, torch.float32, torch.device('cpu')); cache.pool.zero_()\n"
        "block = cache.pool.nbytes // 2000; before = resident_shared_bytes()\n"
        "pool = HostPool(cache, 2**28 // block); reserved = resident_shared_bytes() - before\n"
        "pool.copy_out(range(1000), range(1000))\n"
        "print(reserved >> 20, (resident_shared_bytes() - before - 1000 * block) >> 20)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    reserved_mib, beside_mib = map(int, done.stdout.split())
    assert reserved_mib < 4
    assert -4 < beside_mib < 12


@given(st.lists(st.integers(0, 9), unique=True), st.integers(1, 10))
def test_runs_are_the_blocks(blocks: list[int], blocks_per_chunk: int) -> None:
    """Runs cover all blocks in order, none crosses a chunk's border, and no run could be joined with the next."""
    found = list(runs(blocks, blocks_per_chunk))
    assert [block + i for _, block, count in found for i in range(count)] == blocks
    assert [at + i for at, _, count in found for i in range(count)] == list(range(len(blocks)))
    assert all(block // blocks_per_chunk == (block + count - 1) // blocks_per_chunk for _, block, count in found)
    assert all(
        block + count != next_block or next_block % blocks_per_chunk == 0
        for (_, block, count), (_, next_block, _) in pairwise(found)
    )


@pytest.mark.parametrize("staging_bytes", [1, 20_000, 10**6])
@pytest.mark.parametrize("tokens_per_block", [1, 4, 5])
def test_staging_changes_no_byte(staging_bytes: int, tokens_per_block: int) -> None:
    """A staging buffer of any size, as on a GPU, copies the same bytes to the same places."""
    cache = filled_cache(torch.bfloat16, tokens_per_block)
    host = torch.zeros_like(cache.blocks, memory_format=torch.contiguous_format)[:5]
    copier = StagedCopier(cache.blocks, host, staging_bytes)
    before = cache.blocks.clone()
    copier.copy((3, 0, 4, 1), (1, 2, 4, 0), out=True)
    assert torch.equal(host, torch.stack([before[1], before[3], before[0], torch.zeros_like(before[0]), before[4]]))
    copier.copy((5, 2, 3), (1, 2, 4), out=False)
    assert torch.equal(cache.blocks, before[[0, 1, 0, 4, 4, 3]])
