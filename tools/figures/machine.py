"""The machine that a measurement ran on."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

_RELEVANT = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_bf16", "amx_int8")


@dataclass(frozen=True, slots=True)
class Machine:
    """``isa`` are the CPU's instruction sets that matter to inference; ``gpu`` is None if no GPU was used."""

    cpu: str
    cores: int
    isa: tuple[str, ...] = ()
    gpu: str | None = None


def parse_cpuinfo(text: str) -> tuple[str, tuple[str, ...]]:
    """The CPU's name and instruction sets from /proc/cpuinfo; the name is empty if the file has none (as on Arm)."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    return fields.get("model name", ""), tuple(flag for flag in _RELEVANT if flag in flags)


def this_machine(cpuinfo: Path = Path("/proc/cpuinfo"), gpu: str | None = None) -> Machine:
    try:
        name, isa = parse_cpuinfo(cpuinfo.read_text(encoding="utf-8"))
    except OSError:
        name, isa = "", ()
    return Machine(name or platform.processor() or platform.machine(), len(os.sched_getaffinity(0)), isa, gpu)


def machine_line(machine: Machine) -> str:
    """The machine for a person, in one line."""
    isa = f" ({', '.join(machine.isa)})" if machine.isa else ""
    gpu = f"; {machine.gpu}" if machine.gpu else ""
    return f"{machine.cpu}, {machine.cores} cores{isa}{gpu}"
