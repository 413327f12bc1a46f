"""The KV pool: one tensor of slots for all requests; who owns which block is the core's business."""

from pathlib import Path

import torch
from torch import Tensor

from actorserve.model_files.description import DecoderConfig
from workers.batch import Batch

_CPU_SHARE = 0.25  # of the available memory, for all workers of this host together
_CPU_MAX_BYTES = 2 * 2**30
_CUDA_SHARE = 0.85  # of the memory that is free once the weights are loaded
_CUDA_ACTIVATION_BYTES = 2**30


class KVCache:
    """``pool``: [num_layers, 2, num_kv_heads, num_slots, head_dim]; slot = block * tokens_per_block + offset."""

    def __init__(
        self, config: DecoderConfig, num_blocks: int, tokens_per_block: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        # Not cleared here, which would touch all of it: blocks are cleared as they are taken, see begin().
        self.pool = torch.empty(
            (config.num_layers, 2, config.num_kv_heads, num_blocks * tokens_per_block, config.head_dim),
            dtype=dtype,
            device=device,
        )
        self.layers: tuple[tuple[Tensor, Tensor], ...] = tuple((layer[0], layer[1]) for layer in self.pool)
        """Each layer's keys and values, [num_kv_heads, num_slots, head_dim]."""

    def begin(self, batch: Batch) -> None:
        """Clear the blocks that get their first token now.

        Attention reads whole blocks, with weight 0 beyond a request's tokens; a former owner's infinity or NaN
        must not be there, for 0 times that is NaN.
        """
        if batch.fresh_blocks.numel():
            layers, both, kv_heads, _, head_dim = self.pool.shape
            blocks = self.pool.view(layers, both, kv_heads, self.num_blocks, self.tokens_per_block, head_dim)
            blocks.index_fill_(3, batch.fresh_blocks, 0.0)

    def write(self, layer: int, batch: Batch, keys: Tensor, values: Tensor) -> None:
        """Store this step's keys and values, [T, num_kv_heads, head_dim]."""
        for pool, new in zip(self.layers[layer], (keys, values), strict=True):
            pool.index_copy_(1, batch.slots, new.transpose(0, 1))


def bytes_per_token(config: DecoderConfig, dtype: torch.dtype) -> int:
    """KV bytes of one token over all layers."""
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize


def default_pool_bytes(device: torch.device, num_workers_on_host: int) -> int:
    """How large a pool the free memory suggests; to be asked once the weights are loaded.

    CPU: a quarter of what is available, shared by the host's workers, at most 2 GiB each. CUDA: 85 % of what is free
    beyond a reserve for activations; a GPU is taken to serve one worker.
    """
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return max(0, int(_CUDA_SHARE * (free_bytes - _CUDA_ACTIVATION_BYTES)))
    return min(_CPU_MAX_BYTES, int(_CPU_SHARE * available_memory_bytes()) // num_workers_on_host)


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that can be taken without swapping, within the control group's limit where there is one (Linux)."""
    available = 4 * 2**30  # where nobody tells
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = _read(root / "sys/fs/cgroup/memory.max"), _read(root / "sys/fs/cgroup/memory.current")
    if limit.strip().isdigit() and used.strip().isdigit():
        available = min(available, max(0, int(limit) - int(used)))
    return available


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii")
    except OSError:
        return ""
