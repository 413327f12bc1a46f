"""The options that an engine is made with."""

from dataclasses import dataclass
from typing import Final

from actorserve.options import CPU_LIMITS, SchedulingOptions

_DEFAULTS: Final = SchedulingOptions()


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine computes, and how much memory it may take.

    ``device``: ``cpu``, ``cuda`` or ``cuda:N``. ``dtype``: the numeric mode (``workers.kernels.numerics``).
    ``num_threads``: threads of the whole process, on a CPU. ``max_context_tokens``: None for the model's own.
    ``max_batch_requests`` and ``max_batch_tokens``: the largest iteration, for which memory is kept free.

    ``memory_bytes``: what the process may take of the host's memory; None for what is available.
    ``kv_cache_bytes``: the KV pool's size; None for what memory suggests. ``host_kv_bytes``: the size of the pool that
    KV is swapped out to; 0 for no such pool, None for what device and memory suggest.
    """

    device: str = "cpu"
    dtype: str = "auto"
    num_threads: int = 1
    tokens_per_block: int = _DEFAULTS.tokens_per_block
    max_context_tokens: int | None = None
    max_batch_requests: int = CPU_LIMITS.requests
    max_batch_tokens: int = CPU_LIMITS.tokens
    memory_bytes: int | None = None
    kv_cache_bytes: int | None = None
    host_kv_bytes: int | None = None
