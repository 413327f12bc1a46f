"""Rotary position embedding (Su et al., "RoFormer", 2021, section 3.4) and its scalings beyond the trained context.

Numpy computes the angles once on the host, so that they depend only on the position.
"""

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actorserve.errors import ModelError
from actorserve.model_files.description import DecoderConfig
from workers.weights.decoder_weights import Weights

Floats = npt.NDArray[np.float32]

_POSITIONS_AT_A_TIME = 4096  # while a table is computed: a few megabytes in float64


class RotaryTable:
    """Cosines and sines of every position, [num_positions, 1, head_dim / 2] float32.

    If the config's ``rotary_dim`` is less than its ``head_dim``, the pairs from ``rotary_dim / 2`` on are not rotated:
    their cosines are one and their sines zero.
    """

    def __init__(self, config: DecoderConfig, num_positions: int, device: torch.device) -> None:
        """Raises: ValueError or ArithmeticError if the scaling's numbers give no angles."""
        frequencies, scale = rotary_frequencies(config, num_positions)
        if not (np.isfinite(frequencies).all() and math.isfinite(scale)):
            raise ValueError("the angles are not finite")
        positions = np.arange(num_positions, dtype=np.float32)[:, None, None]
        shape = (num_positions, 1, config.head_dim // 2)
        self._cos, self._sin = torch.ones(shape, device=device), torch.zeros(shape, device=device)
        for first in range(0, num_positions, _POSITIONS_AT_A_TIME):
            some = slice(first, first + _POSITIONS_AT_A_TIME)
            angles = (positions[some] * frequencies).astype(np.float64)
            self._cos[some, :, : len(frequencies)] = torch.from_numpy((np.cos(angles) * scale).astype(np.float32))
            self._sin[some, :, : len(frequencies)] = torch.from_numpy((np.sin(angles) * scale).astype(np.float32))

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[T] int64 -> cosines and sines, each [T, 1, head_dim / 2]."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


def rotary_table(weights: Weights, num_positions: int, *, local: bool = False) -> RotaryTable:
    """The angles of the model's layers, or with ``local`` those of its layers with a window, if they have their own.

    Raises: ModelError if the model's settings give no angles.
    """
    try:
        config = local_rotary(weights.config) if local else weights.config
        return RotaryTable(config, num_positions, weights.device)
    except (ArithmeticError, ValueError) as error:
        raise ModelError(f"{weights.path}: RoPE cannot be computed: {error}") from None


def max_positions(config: DecoderConfig) -> int:
    """The most positions that the model can be served with; ``dynamic`` scaling allows more than the model's own."""
    scaling = config.rope_scaling
    if scaling is not None and scaling["rope_type"] == "dynamic":
        return int(config.max_position_embeddings * max(1.0, _number(scaling, "factor")))
    return config.max_position_embeddings


def local_rotary(config: DecoderConfig) -> DecoderConfig:
    """``config`` for the RotaryTable of layers that use ``local_rope_theta``, to which no scaling applies.

    Raises: ValueError if it has no ``local_rope_theta``.
    """
    if config.local_rope_theta is None:
        raise ValueError("layers with a window have no RoPE base of their own")
    return replace(config, rope_theta=config.local_rope_theta, rope_scaling=None)


def angles_follow_context(config: DecoderConfig) -> bool:
    """Whether a token's angles depend on ``num_positions``, the longest context that is served. If so, workers with
    different limits are of different kinds.
    """
    return config.rope_scaling is not None and config.rope_scaling["rope_type"] in ("dynamic", "longrope")


def rotary_frequencies(config: DecoderConfig, num_positions: int) -> tuple[Floats, float]:
    """The angle per position of each of the rotary_dim / 2 pairs, and the factor of cosines and sines."""
    scaling = config.rope_scaling or {"rope_type": "none"}
    match scaling["rope_type"]:
        case "none":
            return _frequencies(config.rope_theta, config.rotary_dim), 1.0
        case "linear":
            return _frequencies(config.rope_theta, config.rotary_dim) / np.float32(_number(scaling, "factor")), 1.0
        case "dynamic":
            return _dynamic(config, scaling, num_positions), 1.0
        case "llama3":
            return _llama3(config, scaling), 1.0
        case "yarn":
            return _yarn(config, scaling)
        case "factors":
            factors = np.array(scaling["factors"], np.float32)
            return _frequencies(config.rope_theta, config.rotary_dim) / factors, 1.0
        case "longrope":
            return _longrope(config, scaling, num_positions)
        case other:
            raise ValueError(f"unknown RoPE scaling {other}")


def _number(scaling: dict[str, object], name: str, default: float | None = None) -> float:
    value = scaling.get(name)
    if value is None:
        value = default
    if not isinstance(value, int | float):
        raise ValueError(f"RoPE scaling {scaling['rope_type']}: {name} is {value!r}, not a number")
    return float(value)


def _frequencies(theta: float, head_dim: int) -> Floats:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    result: Floats = np.float32(1.0) / np.power(np.float32(theta), exponents)
    return result


def _dynamic(config: DecoderConfig, scaling: dict[str, object], num_positions: int) -> Floats:
    """Dynamic NTK: a larger base for a longer context.

    The usual implementation uses the length so far, so a token's key depends on when it was computed. Ours always uses
    the longest context that is served. If that is within the trained context, both are plain RoPE.
    """
    factor, trained = _number(scaling, "factor"), config.max_position_embeddings
    stretched = factor * max(num_positions, trained) / trained - (factor - 1)
    return _frequencies(
        config.rope_theta * stretched ** (config.rotary_dim / (config.rotary_dim - 2)), config.rotary_dim
    )


def _longrope(config: DecoderConfig, scaling: dict[str, object], num_positions: int) -> tuple[Floats, float]:
    """LongRoPE (Ding et al., 2024, section 3.3): factors found by search, one set for short and one for long contexts.

    The usual implementation changes to the long factors once a text exceeds the trained context, while the cache holds
    keys that were rotated by the short factors. Ours uses one set for all texts, by the longest served context.
    """
    trained = _number(scaling, "original_max_position_embeddings")
    factors = np.array(scaling["long_factor" if num_positions > trained else "short_factor"], np.float32)
    return _frequencies(config.rope_theta, config.rotary_dim) / factors, _number(scaling, "attention_factor")


def _llama3(config: DecoderConfig, scaling: dict[str, object]) -> Floats:
    """Llama 3.1: divide the frequencies of long wavelengths by ``factor``, keep those of short ones, blend between."""
    frequencies = _frequencies(config.rope_theta, config.rotary_dim)
    factor, trained = _number(scaling, "factor"), _number(scaling, "original_max_position_embeddings")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    turns = trained * frequencies.astype(np.float64) / (2 * math.pi)  # within the trained context
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    result: Floats = (frequencies * (keep + (1 - keep) / factor)).astype(np.float32)
    return result


def _yarn(config: DecoderConfig, scaling: dict[str, object]) -> tuple[Floats, float]:
    """YaRN (Peng et al., 2023, sections 3.2 and 3.4): blend by pair index, and raise the attention's temperature."""
    dim, theta = config.rotary_dim, config.rope_theta
    trained = _number(scaling, "original_max_position_embeddings")
    factor = _number(scaling, "factor", config.max_position_embeddings / trained)

    def pair_of(turns: float) -> float:
        """The (fractional) pair that makes so many turns within the trained context."""
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(_number(scaling, "beta_fast", 32.0)), pair_of(_number(scaling, "beta_slow", 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    interpolate = np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
    frequencies = _frequencies(theta, dim)
    blended: Floats = (frequencies * (interpolate / factor + (1 - interpolate))).astype(np.float32)
    return blended, _yarn_scale(scaling, factor)


def _yarn_scale(scaling: dict[str, object], factor: float) -> float:
    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return temperature(_number(scaling, "mscale")) / temperature(_number(scaling, "mscale_all_dim"))
    return temperature(1.0)
