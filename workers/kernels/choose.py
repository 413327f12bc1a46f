"""What an engine computes with on its device: chosen once, at start, and told in one line."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from workers import native
from workers.kernels.linear import Linear, linear_class
from workers.kernels.numerics import Numerics
from workers.kernels.quantized_linear import QuantizedLinear, quantize
from workers.kernels.row_ops import NativeRowOps, RowOps, TorchRowOps
from workers.weights.store import WeightStore

ReadLinear = Callable[[], tuple[Tensor, Tensor | None]]
"""Reads a weight, [out_features, in_features], and a bias, [out_features], in the dtype between the layers."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The implementations for one numeric mode on one device. ``native``: whether ours for CPUs are there to be used.

    Integer layers have the same bits with and without the native kernels; attention and row operations have not, so
    that is part of a worker's kind.
    """

    numerics: Numerics
    device: torch.device
    native: bool

    def make_linear(self, store: WeightStore, name: str, read: ReadLinear, bits: int | None) -> Linear:
        """The layer of what ``read`` reads, or of what an earlier start kept under that name.

        ``bits``: the numeric mode's, of such a layer.
        """
        if bits is not None:
            return QuantizedLinear(store.quantized(name, lambda: quantize(*read(), bits)))
        return linear_class(self.device, self.numerics.activations)(*read())

    @property
    def row_ops(self) -> RowOps:
        return NativeRowOps() if self.native and self.numerics.activations == torch.float32 else TorchRowOps()

    @property
    def rows_are_independent(self) -> bool:
        """Whether every token-wise function has the same bits in any batch as it is, so that nobody needs tiles."""
        return self.native and self.numerics.weight_bits is not None

    def facts(self) -> dict[str, object]:
        """What decides bits, for the worker's kind."""
        facts: dict[str, object] = {"numerics": self.numerics, "row ops": self.row_ops.name, "code": _code_digest()}
        if self.numerics.weight_bits is None:
            facts["linear"] = linear_class(self.device, self.numerics.activations).__name__
        if self.native:
            facts["native"] = native.digest()
        return facts

    def describe(self) -> str:
        """For a person: the mode, and by which kernels it is computed."""
        what = f"weights {self.numerics.name}, KV {str(self.numerics.kv).removeprefix('torch.')}"
        return f"{what}; {native.describe()}" if self.device.type == "cpu" else what


def choose_kernels(numerics: Numerics, device: torch.device) -> Kernels:
    return Kernels(numerics, device, native=device.type == "cpu" and native.load())


@cache
def _code_digest() -> str:
    """Of all our Python: most of it decides bits, so workers of two versions are of two kinds."""
    folder = Path(__file__).parents[1]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(folder.rglob("*.py")))).hexdigest()
