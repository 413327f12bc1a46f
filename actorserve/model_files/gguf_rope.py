"""Rotary embedding in a GGUF file: metadata, and tensors of factors."""

from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType

from actorserve.errors import ModelError
from actorserve.model_files.gguf_reader import GgufFile
from actorserve.model_files.rope import Rope
from actorserve.model_files.values import Values

_TYPES = ("linear", "yarn", "longrope")
_ORIGINAL = "rope.scaling.original_context_length"
_FREQS, _SHORT, _LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"


def read_rope(file: GgufFile, path: Path, values: Values, head_dim: int) -> Rope:
    """Raises: ModelError if the type is not supported or the numbers give no angles."""
    rotary_dim = values.integer("rope.dimension_count", head_dim)
    return Rope(values.number("rope.freq_base", 1e4), _scaling(file, path, values, rotary_dim), rotary_dim)


def _scaling(file: GgufFile, path: Path, values: Values, rotary_dim: int) -> dict[str, object] | None:
    rope_type = values.text("rope.scaling.type", "none")
    if _FREQS in file.tensors:
        if rope_type != "none":
            raise ModelError(f"{path}: RoPE scaling {rope_type[:40]!r} together with {_FREQS} is unsupported")
        return {"rope_type": "factors", "factors": _factors(file, path, _FREQS, rotary_dim)}
    if rope_type in ("none", "longrope") and (_SHORT in file.tensors or _LONG in file.tensors):
        return {
            "rope_type": "longrope",
            "short_factor": _factors(file, path, _SHORT, rotary_dim),
            "long_factor": _factors(file, path, _LONG, rotary_dim),
            "original_max_position_embeddings": values.integer(_ORIGINAL, values.integer("context_length")),
            "attention_factor": values.number("rope.scaling.attn_factor", 1.0),
        }
    if rope_type == "none":
        # Older files write a linear factor without naming the type.
        factor = values.number("rope.scale_linear", 1.0)
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    if rope_type not in _TYPES:
        raise values.unsupported("RoPE scaling", rope_type, _TYPES)
    if rope_type == "longrope":
        raise ModelError(f"{path}: tensor {_SHORT} is missing")
    factor = values.number("rope.scaling.factor")
    if rope_type == "linear":
        return {"rope_type": "linear", "factor": factor}
    original = values.integer(_ORIGINAL, values.integer("context_length"))
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}


def _factors(file: GgufFile, path: Path, name: str, rotary_dim: int) -> tuple[float, ...]:
    tensor = file.tensors.get(name)
    if tensor is None:
        raise ModelError(f"{path}: tensor {name} is missing")
    if tensor.type != GGMLQuantizationType.F32 or tensor.shape != (rotary_dim // 2,):
        raise ModelError(f"{path}: tensor {name} is not {rotary_dim // 2} float32 numbers")
    numbers = np.fromfile(path, "<f4", rotary_dim // 2, offset=tensor.offset)
    if not (np.isfinite(numbers).all() and (numbers > 0).all()):
        raise ModelError(f"{path}: tensor {name} has numbers that are not positive")
    factors: tuple[float, ...] = tuple(numbers.tolist())
    return factors
