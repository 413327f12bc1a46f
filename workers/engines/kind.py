"""A worker's kind: a digest of everything that decides the bits it makes (design invariant 3)."""

import hashlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

_CPU_FACTS = (
    "vendor_id",
    "cpu family",
    "model",
    "model name",
    "stepping",
    "flags",
    "CPU part",
    "Features",
    "cache size",
)
_ARRAY_VARIABLES = ("ATEN_", "DNNL_", "KMP_", "MKL_", "NPY_", "OMP_", "ONEDNN_", "TORCH_")
_CUDA_VARIABLES = ("CUBLAS", "CUDNN_", "NVIDIA_TF32")


def kind_digest(facts: Mapping[str, object]) -> str:
    """SHA-256 of the facts' text, in hex; the order of the facts does not matter."""
    text = "\n".join(f"{name}={value}" for name, value in sorted(facts.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def platform_facts(device: torch.device) -> dict[str, object]:
    """The properties of this machine and this build of torch that may decide bits."""
    facts: dict[str, object] = {
        "torch": torch.__version__,
        "numpy": np.__version__,  # computes the rotary angles, and chooses tokens on a CPU
        "machine": platform.machine(),
        "environment": sorted(
            item for item in os.environ.items() if item[0].startswith(_ARRAY_VARIABLES + _CUDA_VARIABLES)
        ),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": torch.cuda.get_device_name(device),
            "capability": torch.cuda.get_device_capability(device),
            "processors": properties.multi_processor_count,  # libraries choose kernels by it
            "cuda": torch.version.cuda,
        }
    else:
        facts |= {
            "capability": torch.backends.cpu.get_cpu_capability(),
            "cpu": _cpu_facts(Path("/proc/cpuinfo")),
            "threads": torch.get_num_threads(),
        }
    return facts


def _cpu_facts(cpuinfo: Path) -> object:
    """Model and features of the first processor (Linux), without its number and its current speed."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    entries = (line.partition(":") for line in lines)
    return sorted((name.strip(), value.strip()) for name, _, value in entries if name.strip() in _CPU_FACTS)
