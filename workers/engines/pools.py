"""An engine's KV pools: on its device, on the host, and both as bytes for transfers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from actorserve.errors import SettingsError
from actorserve.model_files.description import DecoderConfig
from workers.kv.cache import KVCache, bytes_per_token
from workers.kv.device_progress import DeviceProgress
from workers.kv.layer_progress import LayerProgress
from workers.kv.layer_split import LayerSplit
from workers.kv.pinning import CudaPinner
from workers.kv.pools import HostBlocks, KVPools, layout_digest
from workers.kv.swap import HostPool
from workers.kv_transfer.cuda import CudaBlocks
from workers.memory import MemoryPlan


@dataclass(frozen=True, slots=True)
class EnginePools:
    """``cache`` is the device's pool, ``host`` the one that KV is swapped out to, ``kv`` both as transfers see them.
    A block is of one layer group.
    """

    cache: KVCache
    host: HostPool
    kv: KVPools
    bytes_per_block: int


@dataclass(frozen=True, slots=True)
class KVForm:
    """How KV lies in the pools."""

    dtype: torch.dtype
    tokens_per_block: int
    keys_transposed: bool


def make_pools(
    config: DecoderConfig,
    split: LayerSplit,
    form: KVForm,
    device: torch.device,
    memory: MemoryPlan,
    progress: Callable[[float], None],
) -> EnginePools:
    """Reserve the pools in the sizes that ``memory`` allows; the weights must be loaded already.

    ``progress`` is called with the share of the host's pool that is pinned, 0 to 1, if the device needs that.

    Raises: SettingsError if the memory does not hold one block, or cannot be had.
    """
    bytes_per_block = bytes_per_token(config, form.dtype, split.layers_per_group) * form.tokens_per_block
    pool_bytes = memory.pool_bytes()
    num_blocks = pool_bytes // bytes_per_block
    if num_blocks < 1:
        raise SettingsError(f"a KV cache of {pool_bytes} bytes holds no block of {bytes_per_block}")
    cache = KVCache(config, num_blocks, form.tokens_per_block, form.dtype, device, form.keys_transposed, split)
    host = HostPool(cache, memory.host_pool_bytes(pool_bytes) // bytes_per_block, progress)
    return EnginePools(cache, host, _as_bytes(config, cache, host), bytes_per_block)


def _as_bytes(config: DecoderConfig, cache: KVCache, host: HostPool) -> KVPools:
    blocks = cache.blocks
    shape = (blocks.shape[1], blocks.shape[2])
    layout = layout_digest(
        pool_dtype=str(cache.pool.dtype),
        tokens_per_block=cache.tokens_per_block,
        keys_transposed=cache.keys_transposed,
        block=shape,
        model=(config.architecture, config.num_layers, config.num_kv_heads, config.head_dim),
        groups=(cache.groups, cache.group_of),
    )
    device_blocks = CudaBlocks(blocks) if blocks.is_cuda else HostBlocks(blocks.numpy())
    host_blocks = HostBlocks(host.blocks.numpy())
    progress = _progress(cache, config.num_layers)
    return KVPools(layout, shape, device_blocks, host_blocks, cache.memory, host.memory, host.written, progress)


def _progress(cache: KVCache, num_layers: int) -> LayerProgress | None:
    """None if other workers cannot follow iterations: the driver pins no memory, or blocks have not all layers."""
    if cache.groups.num_groups > 1:
        return None
    if not cache.pool.is_cuda:
        return LayerProgress(num_layers)
    progress = DeviceProgress(num_layers, cache.pool.device)
    return progress if progress.pin(CudaPinner(cache.pool.device)) else None
