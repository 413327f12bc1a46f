"""The kernels that an engine computes with on its device, chosen once at start."""

import hashlib
import importlib.util
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from workers import native
from workers.kernels.linear import PackedLinear, PlainLinear, linear_class
from workers.kernels.numerics import Numerics
from workers.kernels.row_ops import NativeRowOps, RowOps, TorchRowOps
from workers.kernels.triton.grouped import DTYPES, can_run
from workers.kernels.triton.linear import TritonLinear
from workers.kernels.triton.row_ops import TritonRowOps


@dataclass(frozen=True, slots=True)
class Kernels:
    """The implementations for one numeric mode on one device. ``native``: whether our kernels for CPUs are used.

    Integer layers give the same bits with and without the native kernels. Attention and row operations do not, so
    ``native`` is part of a worker's kind.
    """

    numerics: Numerics
    device: torch.device
    native: bool

    @property
    def float_linear(self) -> type[PackedLinear | PlainLinear | TritonLinear]:
        """The linear layer for weights in the dtype between the layers."""
        return linear_class(self.device, self.numerics.activations)

    @property
    def row_ops(self) -> RowOps:
        if self.device.type == "cuda" and importlib.util.find_spec("triton") is not None:
            return TritonRowOps()
        return NativeRowOps() if self.native and self.numerics.activations == torch.float32 else TorchRowOps()

    @property
    def rows_are_independent(self) -> bool:
        """Whether every token-wise function gives a row the same bits in any batch, so that it needs no tiles.

        On CUDA only torch's linear layers need tiles: other functions of rows give each row a program of its own.
        """
        if self.device.type == "cuda":
            return self.float_linear is TritonLinear
        return self.native and self.numerics.weight_bits is not None

    @property
    def runs_grouped(self) -> bool:
        """Whether the kernel of ``triton.grouped`` runs, which multiplies all experts at once, and packed weights."""
        return self.device.type == "cuda" and self.numerics.activations in DTYPES and can_run(self.device)

    def facts(self) -> dict[str, object]:
        """The choices that decide bits, for the worker's kind."""
        facts: dict[str, object] = {"numerics": self.numerics, "row ops": self.row_ops.name, "code": _code_digest()}
        if self.numerics.weight_bits is None:
            facts["linear"] = self.float_linear.__name__
        if self.float_linear is TritonLinear or self.runs_grouped:
            facts["triton"] = version("triton")
        if self.native:
            facts["native"] = native.digest()
        return facts

    def describe(self) -> str:
        """One line for a person: the numeric mode and the kernels that compute it."""
        what = f"weights {self.numerics.name}, KV {str(self.numerics.kv).removeprefix('torch.')}"
        return f"{what}; {native.describe()}" if self.device.type == "cpu" else what


def choose_kernels(numerics: Numerics, device: torch.device) -> Kernels:
    return Kernels(numerics, device, native=device.type == "cpu" and native.load())


@cache
def _code_digest() -> str:
    """Digest of all Python files of ``workers``. Most decide bits, so workers of two versions are of two kinds."""
    folder = Path(__file__).parents[1]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(folder.rglob("*.py")))).hexdigest()
