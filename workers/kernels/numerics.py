"""Numeric modes: the types of weights, activations and KV, by the names that the setting ``model.dtype`` takes."""

import logging
from dataclasses import dataclass
from typing import Literal

import torch

from actorserve.errors import SettingsError

_log = logging.getLogger(__name__)

_BFLOAT16_CAPABILITY = (8, 0)  # Ampere


@dataclass(frozen=True, slots=True)
class Numerics:
    """``weight_bits``: the width of integer weights (``workers.kernels.quantized_linear``); None for floats of the
    activations' dtype. ``head_bits``: the same for the layer that makes logits, whose errors no later layer corrects.

    ``activations`` is the dtype between layers, ``kv`` that of the KV pool, ``embedding`` that of the token table.
    """

    name: str
    activations: torch.dtype
    kv: torch.dtype
    embedding: torch.dtype
    weight_bits: Literal[8, 4] | None = None
    head_bits: Literal[8] | None = None


_NUMERICS = {
    numerics.name: numerics
    for numerics in (
        Numerics("int8", torch.float32, torch.bfloat16, torch.bfloat16, weight_bits=8, head_bits=8),
        Numerics("int4", torch.float32, torch.bfloat16, torch.bfloat16, weight_bits=4, head_bits=8),
        Numerics("float32", torch.float32, torch.float32, torch.float32),
        Numerics("bfloat16", torch.bfloat16, torch.bfloat16, torch.bfloat16),
    )
}


def numerics(name: str, device: torch.device) -> Numerics:
    """The mode called ``name``; ``auto`` is int8 on a CPU and bfloat16 on a GPU, or float32 on a GPU without bfloat16.

    Raises: SettingsError if the name is unknown, or the device does not have the mode.
    """
    if name == "auto":
        name = "int8" if device.type == "cpu" else _gpus_default(device)
    if name not in _NUMERICS:
        raise SettingsError(f"dtype {name} is unknown: auto, {', '.join(_NUMERICS)}")
    found = _NUMERICS[name]
    if found.weight_bits is not None and device.type != "cpu":
        raise SettingsError(f"dtype {name} is for CPUs; on {device.type} there are bfloat16 and float32")
    if name == "bfloat16" and not _has_bfloat16(device):
        raise SettingsError(f"dtype bfloat16: {_without_bfloat16(device)}; float32 works there")
    return found


def _gpus_default(device: torch.device) -> str:
    if _has_bfloat16(device):
        return "bfloat16"
    # Not float16: numbers of models that were trained in bfloat16 may exceed its range.
    _log.warning("computing in float32, which takes twice the memory: %s", _without_bfloat16(device))
    return "float32"


def _has_bfloat16(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _BFLOAT16_CAPABILITY


def _without_bfloat16(device: torch.device) -> str:
    has, needed = (".".join(map(str, it)) for it in (torch.cuda.get_device_capability(device), _BFLOAT16_CAPABILITY))
    return f"this GPU has compute capability {has}, and bfloat16 needs {needed}"
