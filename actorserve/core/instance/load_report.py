"""What an instance says of its load: its memory, and who is in it."""

from collections.abc import Mapping, Sequence

from actorserve.core.kv.kv_memory import KVMemory
from actorserve.core.messages import LoadReport
from actorserve.core.placement.freeness import virtual_usage_bytes
from actorserve.core.request import Request


def memory_report(memory: KVMemory, order: Sequence[Request], headroom_bytes: Mapping[int, int]) -> LoadReport:
    """A report of the two pools and of all requests, given in the order of scheduling; the rest is at its defaults."""
    bytes_per_block = memory.bytes_of_blocks(1)
    num_usable = memory.device.num_usable_blocks
    num_host = memory.host.num_blocks - memory.num_checkpoint_blocks  # what is kept for others is not there
    waiting = [request for request in order if not request.is_started]
    num_started = len(order) - len(waiting)
    return LoadReport(
        sequence=0,
        num_running=num_started,
        num_waiting=len(waiting),
        kv_total_bytes=num_usable * bytes_per_block,
        kv_used_bytes=(num_usable - memory.device.num_free_blocks) * bytes_per_block,
        virtual_usage_bytes=virtual_usage_bytes(
            order, memory.held_blocks, memory.blocks_wanted, bytes_per_block, headroom_bytes
        ),
        bytes_per_block=bytes_per_block,
        tokens_per_block=memory.tokens_per_block,
        num_preemptions=0,
        num_tokens_looked_up=memory.prefixes.num_tokens_looked_up,
        num_tokens_found=memory.prefixes.num_tokens_found,
        host_total_bytes=num_host * bytes_per_block,
        host_used_bytes=(num_host - memory.host.num_free_blocks) * bytes_per_block,
        kv_needed_bytes=memory.held_blocks * bytes_per_block,
        num_swapped=sum(request.is_swapped for request in order),
        num_swap_outs=memory.num_swap_outs,
        swapped_bytes=memory.num_copied_blocks * bytes_per_block,
        kv_wanted_bytes=sum(memory.blocks_wanted(request) for request in waiting) * bytes_per_block,
    )
