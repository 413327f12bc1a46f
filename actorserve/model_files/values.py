"""Typed, bounded reading of a model's own metadata, which is untrusted: a wrong value is one line, never a crash."""

import math
from collections.abc import Mapping
from pathlib import Path

from actorserve.errors import ModelError
from actorserve.model_files.description import SUPPORTED_ARCHITECTURES, DecoderConfig

_MAX_COUNT = 2**31 - 1
_MAX_LAYERS = 4096
_MAX_POSITIONS = 2**22  # what a table of each position's angles can be made for
_MAX_VOCABULARY = 2**20  # what the sampler can sum


class Values:
    """A mapping read from ``path``, with ``prefix`` before each key. A key that holds None counts as absent."""

    def __init__(self, values: Mapping[str, object], path: Path, prefix: str = "") -> None:
        self._values = values
        self._path = path
        self._prefix = prefix

    def has(self, key: str) -> bool:
        return self._values.get(self._prefix + key) is not None

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = _MAX_COUNT) -> int:
        """Raises: ModelError, when it is absent without a default, no integer, or out of range."""
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
        if not isinstance(value, list) or not all(isinstance(v, int | float) and math.isfinite(v) for v in value):
            raise self._wrong(key, "a list of numbers", value)
        return value

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
    """``config`` itself, when its numbers fit together.

    Raises: ModelError, naming the architecture or the numbers at fault.
    """
    if config.architecture not in SUPPORTED_ARCHITECTURES:
        raise unsupported_architecture(config.architecture, path)
    for count, maximum, what in (
        (config.num_layers, _MAX_LAYERS, "layers"),
        (config.max_position_embeddings, _MAX_POSITIONS, "positions"),
        (config.vocab_size, _MAX_VOCABULARY, "tokens in the vocabulary"),
    ):
        if count > maximum:
            raise ModelError(f"{path}: {count} {what} are more than {maximum}")
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"{path}: {config.num_heads} heads do not share {config.num_kv_heads} KV heads evenly")
    if config.head_dim % 2:
        raise ModelError(f"{path}: head size {config.head_dim} is odd, and RoPE turns pairs")
    return config


def unsupported_architecture(architecture: str, path: Path) -> ModelError:
    """The error for a model that the engine cannot compute."""
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    return ModelError(f"{path}: architecture {architecture[:60]!r} is not supported; supported: {supported}")
