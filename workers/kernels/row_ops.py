"""Token-wise functions between the linear layers: norms, rotary embedding, gated activations, softmax.

Every model leaves plain sums, products and ReLU to torch, because they round once and give the same bits everywhere.
The functions here round several times, so each implementation gives bits of its own. A worker's kind names the
implementation.
"""

from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

Activation = Literal["silu", "gelu_tanh"]


class RowOps(Protocol):
    """Each row's result is a function of that row alone; outputs have the inputs' dtype, sums are float32."""

    @property
    def name(self) -> str:
        """Part of the worker's kind."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[..., D] and [D] -> [..., D]: ``x / sqrt(mean(x^2) + eps) * weight`` (Zhang and Sennrich, 2019)."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """[..., D], [D] and [D] -> [..., D] (Ba et al., 2016)."""
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn each pair (x[i], x[i + head_dim / 2]) of [T, heads, head_dim] by its angle.

        ``cos`` and ``sin``: [T, 1, head_dim / 2] float32.
        """
        ...

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """[R, 2 * I] -> [R, I]: ``activation(gate) * up`` (Shazeer, "GLU variants improve transformer", 2020)."""
        ...

    def softmax(self, x: Tensor) -> Tensor:
        """[R, N] -> [R, N], over the last dimension."""
        ...


class TorchRowOps:
    """Torch's own functions, on any device. Their bits may depend on the number of rows, so run them in tiles."""

    name = "torch"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    def softmax(self, x: Tensor) -> Tensor:
        return torch.softmax(x, dim=-1)


class NativeRowOps:
    """Our own kernels (``workers/native/rows.cpp``), for float32 on the CPU: a row's bits are the same in any batch."""

    name = "native"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y: Tensor = torch.ops.actorserve.rms_norm(x, weight, eps)
        return y

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y: Tensor = torch.ops.actorserve.layer_norm(x, weight, bias, eps)
        return y

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y: Tensor = torch.ops.actorserve.rotate(x, cos, sin)
        return y

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        y: Tensor = torch.ops.actorserve.gated(gate_up, activation == "silu")
        return y

    def softmax(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.actorserve.softmax(x)
        return y
