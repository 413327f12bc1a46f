"""What an engine computes with on its device: chosen once, at start, and told in one line."""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from workers import native
from workers.kernels.linear import PackedLinear, PlainLinear, linear_class
from workers.kernels.numerics import Numerics
from workers.kernels.row_ops import NativeRowOps, RowOps, TorchRowOps


@dataclass(frozen=True, slots=True)
class Kernels:
    """The implementations for one numeric mode on one device. ``native``: whether ours for CPUs are there to be used.

    Integer layers have the same bits with and without the native kernels; attention and row operations have not, so
    that is part of a worker's kind.
    """

    numerics: Numerics
    device: torch.device
    native: bool

    @property
    def float_linear(self) -> type[PackedLinear] | type[PlainLinear]:
        """The linear layer for weights in the dtype between the layers."""
        return linear_class(self.device, self.numerics.activations)

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
            facts["linear"] = self.float_linear.__name__
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
