"""The launches to compile: each Triton kernel of ``workers`` by the Python code that launches it in service.

A new kernel joins by an entry in `LAUNCHES`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch

from tools.benchmarks.kernels.gpus import GPUS
from workers.attention import triton_paged
from workers.kernels.gpu import Gpu
from workers.kernels.triton.linear import TILES, fitting_tiles, run

META: Final = torch.device("meta")
_TOKENS_PER_BLOCK = 16
_SLOTS = 4096
_PROCESSORS = 132


def gpu(capability: int) -> Gpu:
    return Gpu(_PROCESSORS, GPUS[capability].program_shared_bytes)


def attention(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, capability: int) -> None:
    """One step with a prefill and a decode."""
    query_lens, context_lens = np.array([100, 1]), np.array([100, 3000])
    batch: Any = SimpleNamespace(
        query_starts=torch.empty(3, dtype=torch.int32, device=META),
        context_lens=torch.empty(2, dtype=torch.int32, device=META),
        block_tables=torch.empty((2, 200), dtype=torch.int32, device=META),
        tokens_per_block=_TOKENS_PER_BLOCK,
        host_query_lens=query_lens,
        host_context_lens=context_lens,
    )
    query = torch.empty((int(query_lens.sum()), num_heads, head_dim), dtype=dtype, device=META)
    keys = torch.empty((num_kv_heads, _SLOTS, head_dim), dtype=dtype, device=META)
    with patch.object(triton_paged, "gpu_of", return_value=gpu(capability)):
        triton_paged.TritonPagedAttention(head_dim**-0.5)(query, keys, keys, batch)


def linear(number: int, capability: int) -> None:
    """The tile of that number in `TILES`, in a layer that adds a residual; nothing if the GPU has no room for it."""
    weight = torch.empty((4096, 4096), dtype=torch.bfloat16, device=META)
    x = torch.empty((100, 4096), dtype=torch.bfloat16, device=META)
    for tile in fitting_tiles(gpu(capability)):
        if (tile.outputs, tile.rows) == (TILES[number].outputs, TILES[number].rows):
            run(tile, x, weight, None, x)


LAUNCHES: Final[Mapping[str, Callable[[int], object]]] = {
    "attention 32/8 x 128": partial(attention, torch.bfloat16, 32, 8, 128),  # Llama-3-8B
    "attention 9/3 x 64": partial(attention, torch.bfloat16, 9, 3, 64),  # SmolLM2-135M
    "attention 8/4 x 256": partial(attention, torch.bfloat16, 8, 4, 256),  # Gemma 3
    "attention 32/8 x 128 float32": partial(attention, torch.float32, 32, 8, 128),
    **{f"linear {tile.outputs} x {tile.rows}": partial(linear, number) for number, tile in enumerate(TILES)},
}
"""Name to code, which takes the compute capability times 10. Attention is named by its heads, key heads and their
width, linear layers by the outputs and rows of a tile."""
