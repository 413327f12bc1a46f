"""Attention in C++ directly on the paged KV pool, on CPUs with AVX2 or AVX-512 (``workers/native/attention*``).

Arithmetic is float32; the pool is float32 or bfloat16. The partition of keys and the order of sums depend only on the
keys' positions. So a query has the same bits in decode and prefill, in any batch and on any number of threads.
"""

import torch
from torch import Tensor

from workers.batch import Batch

MAX_HEAD_DIM = 256


class NativePagedAttention:
    """The backend for CPUs that have the native kernels."""

    name = "native"  # its constants are in the native kernels' digest
    reads_whole_blocks = False
    keys_transposed = True

    def __init__(self, scale: float) -> None:
        """``scale``: the factor of scores. `workers.native.load` must have returned True."""
        self._scale = scale

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, batch: Batch, window: int | None = None) -> Tensor:
        """See ``workers.attention.base``. Raises: RuntimeError for shapes, types or blocks that do not fit."""
        attended: Tensor = torch.ops.actorserve.paged_attention(
            query.float(),
            keys,
            values,
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
            self._scale,
            window,
        )
        return attended.to(query.dtype)
