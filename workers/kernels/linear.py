"""Linear layers in floats: ``x @ weight.T + bias``, by the kernel of torch that is fast on this machine.

The module also makes layers of the same shapes whose sums cancel. With them ``workers.kernels.tiles.probe`` finds how
many rows at once leave a row's bits unchanged. A kernel that sums in another order changes a float32 sum by about 2^-24
of its terms, and bfloat16 keeps 8 bits: on ordinary numbers one result in 10,000 to 100,000 shows the change, and a
comparison of few results finds nothing. If the exact sum is zero, the result is the rounding error alone, and most
results differ.
"""

import importlib.util
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from workers.kernels.tiles import RowFunction
from workers.kernels.triton.linear import DTYPES, TritonLinear

_MAX_EXPONENT = 8
_MAX_DISTINCT_OUTPUTS = 512  # random numbers take longer to make than to multiply


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
    """oneDNN with weights packed once, as torch's own Inductor does on CPUs.

    Measured on one Zen 4 core in float32: for 1 to 16 rows it takes half of ``F.linear``'s time. It gives equal bits
    for nearly all numbers of rows, while ``F.linear`` differs below four rows.
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


def linear_class(device: torch.device, dtype: torch.dtype) -> type[PackedLinear | PlainLinear | TritonLinear]:
    """The kernel to use for float weights on ``device``."""
    if device.type == "cuda" and dtype in DTYPES and importlib.util.find_spec("triton") is not None:
        return TritonLinear
    return PackedLinear if can_pack(device, dtype) else PlainLinear


@dataclass(frozen=True, slots=True)
class LinearShape:
    """The properties by which torch chooses a kernel, in addition to the number of rows."""

    in_features: int
    out_features: int
    has_bias: bool
    dtype: torch.dtype


def linear_shapes(function: Callable[..., object], *inputs: Tensor) -> tuple[LinearShape, ...]:
    """The shapes of the linear layers that ``function(*inputs)`` runs: each shape once, in order."""
    with _Watch() as watch:
        function(*inputs)
    return tuple(watch.shapes)


def cancelling_linear(
    shape: LinearShape, device: torch.device
) -> tuple[RowFunction, Callable[[int], tuple[Tensor, ...]]]:
    """A layer of that shape, and a function that makes rows for it whose exact sums are all zero; always the same.

    Every product has its negative in another, random column, and so has the bias. Their sizes are spread widely, so
    that adding a few of them rounds: products of two bfloat16 have 16 bits, and float32 has 24.
    """
    num_pairs = (shape.in_features - 1) // 2
    num_single = shape.in_features - 2 * num_pairs  # the last one cancels the bias
    num_distinct = min(shape.out_features, _MAX_DISTINCT_OUTPUTS)
    generator = torch.Generator().manual_seed(0)
    columns = torch.randperm(shape.in_features, generator=generator)
    half = _spread(generator, num_distinct, num_pairs)
    bias = _spread(generator, num_distinct) if shape.has_bias else torch.zeros(num_distinct)
    single = torch.zeros(num_distinct, num_single)
    single[:, -1] = -bias

    outputs = torch.arange(shape.out_features, device=device) % num_distinct
    weight = torch.cat((half, -half, single), dim=1)[:, columns].to(device, shape.dtype)[outputs]
    linear = linear_class(device, shape.dtype)(
        weight, bias.to(device, shape.dtype)[outputs] if shape.has_bias else None
    )

    def make_rows(num_rows: int) -> tuple[Tensor]:
        half = _spread(torch.Generator().manual_seed(1), num_rows, num_pairs)
        rows = torch.cat((half, half, torch.ones(num_rows, num_single)), dim=1)
        return (rows[:, columns].to(device, shape.dtype),)

    return lambda x: (linear(x),), make_rows


def _spread(generator: torch.Generator, *size: int) -> Tensor:
    exponents = torch.randint(-_MAX_EXPONENT, _MAX_EXPONENT + 1, size, generator=generator)
    return torch.randn(size, generator=generator) * exponents.exp2()


class _Watch(TorchFunctionMode):
    """Records the shapes of the linear layers that run inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[LinearShape, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear or func is getattr(torch.ops.mkldnn, "_linear_pointwise", None):
            x, weight, bias = args[:3]
            self.shapes[LinearShape(weight.shape[1], weight.shape[0], bias is not None, x.dtype)] = None
        return func(*args, **(kwargs or {}))
