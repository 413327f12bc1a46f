"""What our Triton kernels' launches must know of a GPU."""

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class Gpu:
    """``shared_bytes``: the shared memory that one program can have."""

    processors: int
    shared_bytes: int


_SMALL = Gpu(3, 99 * 1024)  # for the interpreter


@cache
def gpu_of(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return _SMALL
    properties = torch.cuda.get_device_properties(device)
    # Not every build of torch tells the shared memory.
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", _SMALL.shared_bytes)
    return Gpu(properties.multi_processor_count, shared_bytes)
