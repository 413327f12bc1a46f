"""The attention protocol: what a model calls once a layer."""

from typing import Protocol

from torch import Tensor

from workers.batch import Batch


class Attention(Protocol):
    """Causal attention of each token to its own request's tokens, read from the paged KV pool.

    A token's result is the same bits in any batch, chunking and block size (design invariant 3).
    """

    @property
    def name(self) -> str:
        """The backend and every constant that decides its bits; part of the worker's kind."""
        ...

    @property
    def reads_whole_blocks(self) -> bool:
        """Whether slots after a request's last token are read with weight 0. If so, they must hold finite numbers, and
        blocks are cleared before their first use."""
        ...

    @property
    def keys_transposed(self) -> bool:
        """Whether the pool must hold keys in the layout of ``workers.kv.cache.transposed``."""
        ...

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, batch: Batch, window: int | None = None) -> Tensor:
        """``query``: [T, num_heads, head_dim]; ``keys``, ``values``: [num_kv_heads, num_slots, head_dim], one layer's
        pool with this step's tokens already written (keys may be transposed). With a ``window`` (at least 1) a token at
        position p sees the keys from p - window + 1 to p. Returns [T, num_heads, head_dim] in the query's dtype.
        """
        ...
