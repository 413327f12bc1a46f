"""What a processor of each kind of GPU holds (CUDA C++ programming guide, "Technical specifications")."""

from dataclasses import dataclass
from typing import Final

from tools.benchmarks.kernels.compiled import Compiled

_WARP = 32
_REGISTERS = 64 * 1024
_REGISTER_UNIT = 8  # registers of a thread are given out in these units
_SYSTEM_BYTES = 1024  # of shared memory, in each program
_KIB = 1024


@dataclass(frozen=True, slots=True)
class GpuKind:
    """``shared_bytes`` of a processor, ``program_shared_bytes`` that one program can have, and ``warps`` at once."""

    shared_bytes: int
    program_shared_bytes: int
    warps: int


GPUS: Final = {
    80: GpuKind(164 * _KIB, 163 * _KIB, 64),
    90: GpuKind(228 * _KIB, 227 * _KIB, 64),
    100: GpuKind(228 * _KIB, 227 * _KIB, 64),
    120: GpuKind(100 * _KIB, 99 * _KIB, 48),
}
"""By compute capability times 10."""


def programs_at_once(compiled: Compiled) -> int:
    """How many programs of a kernel fit on a processor; 0 if not even one has enough shared memory."""
    gpu = GPUS[compiled.capability]
    if compiled.shared_bytes > gpu.program_shared_bytes:
        return 0
    registers = -(-compiled.registers // _REGISTER_UNIT) * _REGISTER_UNIT * _WARP * compiled.warps
    shared_bytes = compiled.shared_bytes + _SYSTEM_BYTES
    return min(_REGISTERS // registers, gpu.shared_bytes // shared_bytes, gpu.warps // compiled.warps, 32)
