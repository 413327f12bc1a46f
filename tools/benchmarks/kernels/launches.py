"""The launches to compile: each Triton kernel of ``workers`` by the Python code that launches it in service.

A new kernel joins by an entry in `LAUNCHES`. One entry compiles a kernel once at most.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from actorserve.core.messages import StepPlan
from tools.benchmarks.kernels.gpus import GPUS
from workers.attention import triton_paged
from workers.kernels.gpu import Gpu
from workers.kernels.row_ops import HeadGains
from workers.kernels.triton import grouped, linear as dense
from workers.kernels.triton.row_ops import TritonRowOps
from workers.packed_batch import PackedBatches, PlanLimits
from workers.sampling.token_choice import RULE_FIELDS
from workers.sampling.triton_choice import choose_on_gpu

META: Final = torch.device("meta")
_TOKENS_PER_BLOCK = 16
_SLOTS = 4096
_PROCESSORS = 132
_ROWS = 100
_GROUPED_ROWS = (16, 32, 64, 128)


def gpu(capability: int) -> Gpu:
    return Gpu(_PROCESSORS, GPUS[capability].program_shared_bytes)


def of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def attention(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, capability: int) -> None:
    """One step with a prefill and a decode."""
    query_lens, context_lens = np.array([100, 1]), np.array([100, 3000])
    batch: Any = SimpleNamespace(
        query_starts=of(3, dtype=torch.int32),
        context_lens=of(2, dtype=torch.int32),
        block_tables=of(2, 200, dtype=torch.int32),
        tokens_per_block=_TOKENS_PER_BLOCK,
        host_query_lens=query_lens,
        host_context_lens=context_lens,
    )
    query = of(int(query_lens.sum()), num_heads, head_dim, dtype=dtype)
    keys = of(num_kv_heads, _SLOTS, head_dim, dtype=dtype)
    with patch.object(triton_paged, "gpu_of", return_value=gpu(capability)):
        triton_paged.TritonPagedAttention(head_dim**-0.5)(query, keys, keys, batch)


def linear(number: int, capability: int) -> None:
    """The tile of that number in ``TILES``, in a layer that adds a residual; nothing if the GPU has no room for it."""
    x, weight = of(_ROWS, 4096), of(4096, 4096)
    for tile in dense.fitting_tiles(gpu(capability)):
        if (tile.outputs, tile.rows) == (dense.TILES[number].outputs, dense.TILES[number].rows):
            dense.run(tile, x, weight, None, x)


def packed(form: grouped.Form, tile_rows: int, _: int) -> None:
    """A layer of a quantized checkpoint that adds a residual. int4 is as AWQ has it, with zeros."""
    features, group_inputs = 4096, 128
    groups = (1, features, features // group_inputs)
    weight = grouped.StackedWeight(
        form,
        numbers=of(1, features, features // 2 if form == "int4" else features, dtype=torch.uint8),
        in_features=features,
        scales=of(*groups, dtype=torch.float16),
        zeros=of(*groups, dtype=torch.int16) if form == "int4" else None,
        group_inputs=group_inputs,
    )
    x = of(_ROWS, features)
    grouped.run(x, weight, residual=x, tile_rows=tile_rows)


def _sorted_rows(num_experts: int, ranks: int) -> grouped.SortedRows:
    return grouped.SortedRows(of(_ROWS * ranks, dtype=torch.int64), of(num_experts + 1, dtype=torch.int32), ranks)


def experts(tile_rows: int, _: int) -> None:
    """The first product of Qwen3-30B-A3B's experts."""
    weight = grouped.StackedWeight("plain", of(128, 2 * 768, 2048), 2048)
    grouped.run(of(_ROWS, 2048), weight, _sorted_rows(128, 8), gathers=True, tile_rows=tile_rows)


def choice_of_experts(_: int) -> None:
    """Before the products of Qwen3-30B-A3B's experts, and after them."""
    shares, chosen = grouped.choose_experts(of(_ROWS, 128, dtype=torch.float32), 8, normalizes=True)
    grouped.add_experts(of(chosen.numel(), 2048), shares, of(_ROWS, 2048))


def rows(hidden: int, inner: int, _: int) -> None:
    """Norms and gates of a layer, and the softmax of a few experts, whose number nothing aligns."""
    ops, x, gain = TritonRowOps(), of(_ROWS, hidden), of(hidden)
    ops.rms_norm(x, gain, 1e-5, x)
    ops.layer_norm(x, gain, gain, 1e-5)
    ops.gated(of(_ROWS, 2 * inner), "silu")
    ops.softmax(of(_ROWS, 60))


def heads(num_heads: int, num_kv_heads: int, head_dim: int, _: int) -> None:
    """Heads that are normed, rotated and stored."""
    place_heads = TritonRowOps().place_heads
    assert place_heads is not None
    half = of(_ROWS, 1, head_dim // 2, dtype=torch.float32)
    gains = HeadGains(of(head_dim), of(head_dim), 1e-6)
    keys = of(num_kv_heads, _SLOTS, head_dim)
    row = of(_ROWS, num_heads + 2 * num_kv_heads, head_dim)
    place_heads(row, (half, half), gains, of(_ROWS, dtype=torch.int32), keys, keys)


def plan(_: int) -> None:
    """What completes a step's plan on the GPU, and what keeps its tokens."""
    batches = PackedBatches(PlanLimits(max_requests=64, max_tokens=512, max_blocks=2048), _TOKENS_PER_BLOCK, META)
    step = batches.make(StepPlan(0, ("a", "b"), (0, 0), ((1, 2), (3,)), ((0,), (1,)), (True, True)))
    batches.unpack(step)
    batches.keep_tokens(step, of(2, dtype=torch.int64))


def choice_of_tokens(vocab_size: int, _: int) -> None:
    choose_on_gpu(
        of(64, vocab_size, dtype=torch.float32),
        of(64, RULE_FIELDS, dtype=torch.float64),
        of(64, dtype=torch.int64),
        of(3, vocab_size // 8, dtype=torch.uint8),
    )


LAUNCHES: Final[Mapping[str, Callable[[int], object]]] = {
    "attention 32/8 x 128": partial(attention, torch.bfloat16, 32, 8, 128),  # Llama-3-8B
    "attention 9/3 x 64": partial(attention, torch.bfloat16, 9, 3, 64),  # SmolLM2-135M
    "attention 8/4 x 256": partial(attention, torch.bfloat16, 8, 4, 256),  # Gemma 3
    "attention 32/8 x 128 float32": partial(attention, torch.float32, 32, 8, 128),
    **{f"linear {tile.outputs} x {tile.rows}": partial(linear, number) for number, tile in enumerate(dense.TILES)},
    **{f"int4 linear 64 x {tile_rows}": partial(packed, "int4", tile_rows) for tile_rows in _GROUPED_ROWS},
    **{f"int8 linear 64 x {tile_rows}": partial(packed, "int8", tile_rows) for tile_rows in _GROUPED_ROWS},
    **{f"FP8 linear 64 x {tile_rows}": partial(packed, "fp8", tile_rows) for tile_rows in _GROUPED_ROWS},
    **{f"experts 64 x {tile_rows}": partial(experts, tile_rows) for tile_rows in _GROUPED_ROWS},
    "128 experts, 8 a token": choice_of_experts,
    "rows of 4096": partial(rows, 4096, 14336),  # Llama-3-8B
    "heads 32/8 x 128": partial(heads, 32, 8, 128),  # Qwen3-8B
    "plan": plan,
    "choice of 128256 tokens": partial(choice_of_tokens, 128_256),
    "choice of 1048576 tokens": partial(choice_of_tokens, 2**20),
}
"""Name to code, which takes the compute capability times 10. Attention and heads are named by heads, key heads and
their width, linear layers and experts by the outputs and rows of a tile."""
