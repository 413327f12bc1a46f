"""Rotary embedding in config.json: ``rope_theta`` with ``rope_scaling``, or the newer ``rope_parameters``."""

import math
from collections.abc import Mapping

from actorserve.model_files.rope import Rope
from actorserve.model_files.values import Values

_TYPES = ("linear", "dynamic", "yarn", "llama3", "longrope")
_OLD_TYPES = {"su": "longrope"}
_MAX_FACTOR = 2**20
_NUMBERS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def read_rope(values: Values, head_dim: int, parameters: Mapping[str, object]) -> Rope:
    """``parameters`` are the config's ``rope_parameters``, or their part for one kind of layer.

    Raises: ModelError if the type is not supported or the numbers give no angles.
    """
    scaling = {**values.mapping("rope_scaling", {}), **parameters}
    inner = values.of(scaling)
    theta = (inner if inner.has("rope_theta") else values).number("rope_theta", 1e4)
    part = (inner if inner.has("partial_rotary_factor") else values).number("partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * part)
    if part > 1 or rotary_dim < 2:
        raise values.unsupported("partial_rotary_factor", part)
    rope_type = inner.text("rope_type", inner.text("type", "default"))
    rope_type = _OLD_TYPES.get(rope_type, rope_type)
    for name in ("rope_theta", "partial_rotary_factor", "type"):
        scaling.pop(name, None)
    scaling["rope_type"] = rope_type
    if rope_type == "default":
        return Rope(theta, None, rotary_dim)
    if rope_type not in _TYPES:
        raise values.unsupported("RoPE scaling", rope_type, _TYPES)
    return Rope(theta, _checked(scaling, values, rotary_dim), rotary_dim)


def _checked(scaling: dict[str, object], values: Values, rotary_dim: int) -> dict[str, object]:
    context_length = values.integer("max_position_embeddings")
    inner = values.of(scaling)
    for key in _NUMBERS:
        if inner.has(key):
            inner.number(key, above=-math.inf)
    if scaling["rope_type"] == "longrope":
        return _longrope(scaling, values, rotary_dim, context_length)
    if inner.number("factor") > _MAX_FACTOR:
        raise values.unsupported("RoPE scaling with a factor above", _MAX_FACTOR)
    if scaling["rope_type"] == "llama3":
        inner.integer("original_max_position_embeddings")
        if inner.number("high_freq_factor") <= inner.number("low_freq_factor"):
            raise values.error("high_freq_factor must be above low_freq_factor")
    elif scaling["rope_type"] in ("yarn", "dynamic"):
        scaling.setdefault("original_max_position_embeddings", context_length)
        inner.integer("original_max_position_embeddings")
    return scaling


def _longrope(scaling: dict[str, object], values: Values, rotary_dim: int, context_length: int) -> dict[str, object]:
    """LongRoPE (Ding et al., 2024). The attention factor is computed as in the authors' code."""
    inner = values.of(scaling)
    trained = (inner if inner.has("original_max_position_embeddings") else values).integer(
        "original_max_position_embeddings", 4096, minimum=2
    )
    factor = inner.number("factor", context_length / trained)
    default = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return {
        "rope_type": "longrope",
        "short_factor": _factors(inner, "short_factor", rotary_dim),
        "long_factor": _factors(inner, "long_factor", rotary_dim),
        "original_max_position_embeddings": trained,
        "attention_factor": inner.number("attention_factor", default),
    }


def _factors(inner: Values, key: str, rotary_dim: int) -> tuple[float, ...]:
    factors = inner.numbers(key)
    if len(factors) != rotary_dim // 2 or not all(factor > 0 for factor in factors):
        raise inner.error(f"{key} must be {rotary_dim // 2} positive numbers")
    return tuple(map(float, factors))
