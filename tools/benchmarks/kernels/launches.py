"""The launches to compile: each Triton kernel of ``workers`` by the Python code that launches it in service.

A new kernel joins by an entry in `LAUNCHES`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch

from workers.attention.triton_paged import TritonPagedAttention
from workers.kernels.triton_linear import Gpu, fitting_tiles, run

META: Final = torch.device("meta")
_TOKENS_PER_BLOCK = 16
_SLOTS = 4096
_PROCESSORS = 132
SHARED_BYTES: Final = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""The shared memory that a program can have, by compute capability times 10."""


def attention(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, _: int) -> None:
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
    TritonPagedAttention(head_dim**-0.5)(query, keys, keys, batch)


def linear(in_features: int, out_features: int, capability: int) -> None:
    """Each tile that fits this GPU, as the layer that is added to the layers before it."""
    weight = torch.empty((out_features, in_features), dtype=torch.bfloat16, device=META)
    for tile in fitting_tiles(Gpu(_PROCESSORS, SHARED_BYTES[capability])):
        x = torch.empty((100, in_features), dtype=torch.bfloat16, device=META)
        run(tile, x, weight, None, torch.empty((100, out_features), dtype=torch.bfloat16, device=META))


LAUNCHES: Final[Mapping[str, Callable[[int], object]]] = {
    "attention, 4 heads of 128 a group": partial(attention, torch.bfloat16, 32, 8, 128),
    "attention, 3 heads of 64 a group": partial(attention, torch.bfloat16, 9, 3, 64),
    "attention, 2 heads of 256 a group": partial(attention, torch.bfloat16, 8, 4, 256),
    "attention, 4 heads of 128, float32": partial(attention, torch.float32, 32, 8, 128),
    "linear": partial(linear, 4096, 4096),
}
"""Name to code, which takes the compute capability times 10. The shapes are those of Llama-3-8B, SmolLM2-135M and
Gemma 3."""
