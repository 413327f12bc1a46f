"""The KV pool holds the keys and values that were written, rounded to its type, in the batch's slots."""

import pytest
import torch
from torch import Tensor

from actorserve.core.messages import StepPlan
from tests.workers.kv.small_cache import CONFIG, CPU, needs_native
from workers.batch import Batch, make_batch
from workers.kv.cache import KVCache

PAIRS = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]


def batch_of(num_tokens: int, tokens_per_block: int = 4) -> Batch:
    table = tuple(reversed(range(-(-num_tokens // tokens_per_block))))
    plan = StepPlan(0, ("a",), (0,), ((1,) * num_tokens,), (table,), (False,))
    return make_batch(plan, tokens_per_block, CPU)


def written(
    keys_transposed: bool, dtype: torch.dtype, batch: Batch, keys: Tensor, values: Tensor, tokens_per_block: int = 4
) -> Tensor:
    """[num_layers, 2, num_kv_heads, num_slots, head_dim], with transposed keys put back in order."""
    cache = KVCache(CONFIG, 800 // tokens_per_block, tokens_per_block, dtype, CPU, keys_transposed)
    cache.pool.zero_()
    cache.write(1, batch, keys, values)
    return torch.stack(
        [torch.stack([k.transpose(2, 3).reshape(v.shape) if keys_transposed else k, v]) for k, v in cache.layers]
    )


def numbers(num_tokens: int, dtype: torch.dtype) -> Tensor:
    """[T, num_kv_heads, head_dim], a slice of a wider tensor as a model has it: tiny, huge, halfway, infinite."""
    wide = torch.randn(num_tokens, 8, CONFIG.head_dim, generator=torch.Generator().manual_seed(num_tokens))
    wide[0, 3, :6] = torch.tensor([torch.inf, -torch.inf, 3.4e38, 1e-45, 1.00390625, 1.01171875])
    return wide.to(dtype)[:, 3:6]


@pytest.mark.parametrize(("activations", "kv"), PAIRS)
def test_write_rounds_into_the_slots(activations: torch.dtype, kv: torch.dtype) -> None:
    """One layer's keys and values are in the batch's slots, rounded as torch rounds; other slots do not change."""
    batch, keys = batch_of(13), numbers(13, activations)
    pool = written(False, kv, batch, keys, 2 * keys)
    assert torch.equal(pool[1, 0][:, batch.slots], keys.transpose(0, 1).to(kv))
    assert torch.equal(pool[1, 1][:, batch.slots], (2 * keys).transpose(0, 1).to(kv))
    assert not pool[0].any()
    assert pool[1].count_nonzero() == keys.to(kv).count_nonzero() + (2 * keys).to(kv).count_nonzero()


@needs_native
@pytest.mark.parametrize(("activations", "kv"), PAIRS)
@pytest.mark.parametrize("num_tokens", [1, 13, 700])
@pytest.mark.parametrize("tokens_per_block", [1, 4, 5, 16])
def test_transposed_store_is_the_same(
    activations: torch.dtype, kv: torch.dtype, num_tokens: int, tokens_per_block: int
) -> None:
    """Transposed keys are stored with the same bits in other places, and NaN as NaN."""
    batch, keys = batch_of(num_tokens, tokens_per_block), numbers(num_tokens, activations)
    plain = written(False, kv, batch, keys, -keys, tokens_per_block)
    assert torch.equal(written(True, kv, batch, keys, -keys, tokens_per_block), plain)
    keys = torch.full_like(keys, torch.nan)
    assert written(True, kv, batch, keys, keys, tokens_per_block)[1].isnan().sum() == 2 * keys.numel()


@needs_native
def test_native_store_refuses_a_slot_outside_the_pool() -> None:
    """A slot that the pool does not have raises, and nothing is written."""
    cache = KVCache(CONFIG, 2, 4, torch.float32, CPU, keys_transposed=True)
    with pytest.raises(RuntimeError, match="slot 8 is outside"):
        cache.write(0, batch_of(12), numbers(12, torch.float32), numbers(12, torch.float32))


def test_begin_clears_fresh_blocks_alone() -> None:
    """Blocks that get their first token are cleared in every layer; blocks with tokens are not."""
    cache = KVCache(CONFIG, 4, 4, torch.float32, CPU)
    cache.pool.fill_(torch.nan)
    cache.begin(make_batch(StepPlan(0, ("a",), (3,), ((1,) * 3,), ((2, 1),), (False,)), 4, CPU))
    cleared = cache.pool.view(2, 2, 3, 4, 4, 18).isnan().logical_not().flatten(4).all(-1)
    assert cleared.all((0, 1, 2)).tolist() == [False, True, False, False]
    assert cache.pool.isnan().sum() == cache.pool.numel() * 3 // 4
