"""Virtual usage and freeness: one number for how loaded an instance is (Llumnix, Algorithm 1).

A request's virtual usage V, in bytes of KV:

- queueing: its demand if it is the head of the line, else 0. The head of the line is the first request not yet
  started, in the order of scheduling: one big waiting request makes its instance look full, so room is made for it.
- running: what it holds, plus its priority's headroom shared among the running requests of that priority. Blocks that
  several requests share count once in the sum, as in memory. Blocks that are merely cached do not count.

Freeness F = (M - sum of V) / B with M the KV memory in bytes and B = max(1, running requests). It estimates how many
iterations the batch can still run (each adds one token per request) and may be negative. A terminating instance counts
as infinitely loaded.
"""

from collections.abc import Callable, Mapping, Sequence

from actorserve.core.request import Request


def virtual_usage_bytes(
    order: Sequence[Request],
    held_blocks: int,
    blocks_wanted: Callable[[Request], int],
    bytes_per_block: int,
    headroom_bytes: Mapping[int, int],
) -> int:
    """The sum of V over an instance's requests, which ``order`` has in scheduling order.

    ``held_blocks`` is what the running requests hold together, ``blocks_wanted`` gives what a waiting request would
    take in addition, and ``headroom_bytes`` is by priority.
    """
    usage = 0
    if headroom_bytes:
        priorities = {request.spec.priority for request in order if request.is_started}
        # Each request of a priority adds headroom / (their number). In sum, each priority adds its headroom once.
        usage = sum(num_bytes for priority, num_bytes in headroom_bytes.items() if priority in priorities)
    head_of_line = next((request for request in order if not request.is_started), None)
    num_blocks = held_blocks + (0 if head_of_line is None else blocks_wanted(head_of_line))
    return usage + num_blocks * bytes_per_block


def freeness(memory_bytes: int, usage_bytes: int, num_running: int, *, terminating: bool = False) -> float:
    """F in bytes per running request; minus infinity for a terminating instance."""
    if terminating:
        return float("-inf")
    return (memory_bytes - usage_bytes) / max(1, num_running)
