"""Reads a model's metadata with checks of types and bounds. It is untrusted, so a wrong value is a one-line error."""

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from actorserve.errors import ModelError
from actorserve.model_files.description import DecoderConfig

_MAX_COUNT = 2**31 - 1
MAX_LAYERS = 4096
_MAX_POSITIONS = 2**22  # the largest table of rotary angles
_MAX_EXPERTS = 2**16  # over all layers
_MAX_VOCABULARY = 2**20  # the largest that the sampler supports


class Values:
    """A mapping read from ``path``, with ``prefix`` before each key. A key with the value None counts as absent."""

    def __init__(self, values: Mapping[str, object], path: Path, prefix: str = "") -> None:
        self._values = values
        self._path = path
        self._prefix = prefix

    def has(self, key: str) -> bool:
        return self._values.get(self._prefix + key) is not None

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = _MAX_COUNT) -> int:
        """Raises: ModelError if the value is absent without a default, not an integer, or out of range."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "an integer", value)
        if not minimum <= value <= maximum:
            raise self._wrong(key, f"from {minimum} to {maximum}", value)
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 0.0) -> float:
        """A finite number greater than ``above``. Raises: ModelError."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number", value)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not above < number < math.inf:
            raise self._wrong(key, f"finite and above {above:g}", value)
        return number

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Raises: ModelError."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Raises: ModelError."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "text", value)
        return value

    def texts(self, key: str) -> list[str]:
        """Raises: ModelError."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of texts", value)
        return value

    def integers(self, key: str) -> list[int]:
        """Raises: ModelError."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise self._wrong(key, "a list of integers", value)
        return value

    def numbers(self, key: str) -> list[float]:
        """Finite numbers. Raises: ModelError."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(
            isinstance(v, int | float) and abs(v) <= sys.float_info.max for v in value
        ):
            raise self._wrong(key, "a list of numbers", value)
        return value

    def mapping(self, key: str, default: Mapping[str, object] | None = None) -> Mapping[str, object]:
        """Raises: ModelError."""
        value = self._get(key, default)
        if not isinstance(value, Mapping):
            raise self._wrong(key, "an object", value)
        return value

    def of(self, values: Mapping[str, object]) -> "Values":
        """``values`` as another mapping of the same file."""
        return Values(values, self._path)

    def with_defaults(self, defaults: Mapping[str, object]) -> "Values":
        """The same values, with these defaults for absent keys."""
        return Values(
            {**defaults, **{key: value for key, value in self._values.items() if value is not None}}, self._path
        )

    def is_null(self, key: str) -> bool:
        """Whether the key is present with the value None, for keys where that differs from an absent key."""
        return self._prefix + key in self._values and not self.has(key)

    def error(self, problem: str) -> ModelError:
        """An error of this file."""
        return ModelError(f"{self._path}: {problem}")

    def unsupported(self, key: str, value: object, supported: Iterable[object] = ()) -> ModelError:
        """The error for a value that the engine cannot compute with."""
        shown = ", ".join(map(str, supported))
        return self.error(f"{key} {value!r:.60} is not supported" + (f"; supported: {shown}" if shown else ""))

    def _get(self, key: str, default: object) -> object:
        value = self._values.get(self._prefix + key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self._path}: {self._prefix}{key} is missing")
        return value

    def _wrong(self, key: str, wanted: str, value: object) -> ModelError:
        shown = repr(value) if isinstance(value, bool | int | float) else type(value).__name__
        return ModelError(f"{self._path}: {self._prefix}{key} must be {wanted}, not {shown[:40]}")


def check_config(config: DecoderConfig, path: Path) -> DecoderConfig:
    """Check that the config's numbers are consistent. Returns it without windows that are as long as its context.

    Raises: ModelError that names the wrong numbers.
    """
    for count, maximum, what in (
        (config.num_layers * config.num_experts, _MAX_EXPERTS, "experts"),
        (config.max_position_embeddings, _MAX_POSITIONS, "positions"),
        (config.vocab_size, _MAX_VOCABULARY, "tokens in the vocabulary"),
    ):
        if count > maximum:
            raise ModelError(f"{path}: {count} {what} are more than {maximum}")
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"{path}: {config.num_heads} heads do not divide evenly among {config.num_kv_heads} KV heads")
    if config.head_dim % 2:
        raise ModelError(f"{path}: head size {config.head_dim} is odd, but RoPE rotates pairs")
    if config.rotary_dim % 2 or config.rotary_dim > config.head_dim:
        raise ModelError(f"{path}: RoPE cannot rotate {config.rotary_dim} of a head's {config.head_dim} dimensions")
    if config.rotary_dim < config.head_dim and config.qk_norm:
        raise ModelError(f"{path}: RoPE over a part of each head is not supported with norms of query and keys")
    if config.experts_per_token > config.num_experts:
        raise ModelError(f"{path}: {config.experts_per_token} experts per token are more than {config.num_experts}")
    # A window as long as the context has no effect, unless layers with a window also differ in another way. Only
    # ``dynamic`` scaling allows contexts longer than max_position_embeddings.
    is_dynamic = config.rope_scaling is not None and config.rope_scaling["rope_type"] == "dynamic"
    if config.local_rope_theta is None and not is_dynamic:
        windows = tuple(window if window < config.max_position_embeddings else 0 for window in config.windows)
        config = replace(config, windows=windows)
    return config


def unsupported_architecture(architecture: str, supported: Iterable[str], path: Path) -> ModelError:
    """The error for a model that the engine cannot compute."""
    shown = ", ".join(supported)
    return ModelError(f"{path}: architecture {architecture[:60]!r} is not supported; supported: {shown}")
