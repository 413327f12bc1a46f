"""Linear layers in floats: ``x @ weight.T + bias``, by whichever kernel of torch is fast here."""

import platform
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class Linear(Protocol):
    """[R, in_features] -> [R, out_features]; ``residual``, of the result's shape, is added last."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor: ...


class PlainLinear:
    """torch's own ``F.linear``."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = F.linear(x, self._weight, self._bias)
        return y if residual is None else y + residual


class PackedLinear:
    """oneDNN with weights packed once, as torch's own Inductor does it on CPUs.

    Measured on one Zen 4 core, float32: for 1 to 16 rows it takes half of ``F.linear``'s time, and it gives equal bits
    for nearly all numbers of rows, where the other one differs below four.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y if residual is None else y + residual


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this CPU and this build of torch have the packed kernel for ``dtype``."""
    if device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def linear_class(device: torch.device, dtype: torch.dtype) -> type[PackedLinear] | type[PlainLinear]:
    """The kernel to use for float weights on ``device``."""
    return PackedLinear if can_pack(device, dtype) else PlainLinear
