"""Messages: what an instance reports of its load."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadReport:
    """w -> c and g, numbered: an instance's load as its own scheduler sees it.

    ``virtual_usage_bytes`` is the sum of V over its requests (``core.placement.freeness``). ``accepted`` names the
    requests that arrived since the previous report, so that the coordinator can drop them from its own account of what
    is under way. ``num_tokens_looked_up`` and ``num_tokens_found`` count, over all requests ever admitted, tokens that
    were looked up in the prefix cache, and those found there; recomputing after a preemption does not count.

    ``kv_*`` is the device's pool, ``host_*`` the one that KV is swapped to. ``kv_needed_bytes`` is the whole KV of all
    started requests, wherever it lies. ``num_swapped`` requests lie on the host now; ``num_swap_outs`` and
    ``swapped_bytes`` (both ways) were in all, and requests were due for the batch but still being copied for
    ``swap_blocked_s`` in all. ``num_migrating`` requests are on their way, in and out; of those that were on their way
    out, ``num_migrated`` were handed over, of ``migrated_bytes`` of KV, and ``num_migrations_failed`` stayed.
    ``kv_reserved_bytes``, a part of the virtual usage, is kept for those on their way in; ``kv_wanted_bytes`` is the
    demand of all that wait, of which the virtual usage holds only the first one's. ``checkpointed_bytes`` were copied
    into another worker's host memory.
    """

    sequence: int
    num_running: int
    num_waiting: int
    kv_total_bytes: int
    kv_used_bytes: int
    virtual_usage_bytes: int
    bytes_per_block: int
    tokens_per_block: int
    num_preemptions: int
    accepted: tuple[str, ...] = ()
    draining: bool = False
    num_tokens_looked_up: int = 0
    num_tokens_found: int = 0
    host_total_bytes: int = 0
    host_used_bytes: int = 0
    kv_needed_bytes: int = 0
    num_swapped: int = 0
    num_swap_outs: int = 0
    swapped_bytes: int = 0
    swap_blocked_s: float = 0.0
    num_migrating: int = 0
    num_migrated: int = 0
    num_migrations_failed: int = 0
    migrated_bytes: int = 0
    kv_reserved_bytes: int = 0
    kv_wanted_bytes: int = 0
    checkpointed_bytes: int = 0
