"""Token-wise functions between the linear layers: norms, rotary embedding, gated activations, softmax.

Every model leaves plain sums, products and ReLU to torch, because they round once and give the same bits everywhere.
The functions here round several times, so each implementation gives bits of its own. A worker's kind names the
implementation.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True, eq=False)
class HeadGains:
    """The weights of an RMSNorm on each head of the query and one on each key, [head_dim] each."""

    query: Tensor
    key: Tensor
    eps: float


class PlaceHeads(Protocol):
    """All that follows a layer's projection to heads, at once: norms of heads, rotation, and storing in the KV pool."""

    def __call__(
        self,
        heads: Tensor,
        angles: tuple[Tensor, ...],
        gains: HeadGains | None,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """``heads``: [T, num_heads + 2 * num_kv_heads, head_dim], first the query's, then keys, then values.

        ``angles``: cosines and sines, [T, 1, head_dim / 2] float32 each, or nothing without RoPE. ``slots``: [T]; a
        token with a negative slot is not stored. ``keys`` and ``values``: one layer's pool, [num_kv_heads, num_slots,
        head_dim]. Returns the query, [T, num_heads, head_dim]. Raises: ValueError for shapes that do not fit.
        """
        ...


class RowOps(Protocol):
    """Each row's result is a function of that row alone; outputs have the inputs' dtype, sums are float32."""

    @property
    def name(self) -> str:
        """Part of the worker's kind."""
        ...

    @property
    def place_heads(self) -> PlaceHeads | None:
        """None if there is no such kernel; then norms of heads, ``rotate`` and ``KVCache.write`` do the same."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        """[..., D] and [D] -> [..., D]: ``x / sqrt(mean(x^2) + eps) * weight`` (Zhang and Sennrich, 2019).

        ``residual``, of the result's shape, is added last.
        """
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

    @property
    def place_heads(self) -> PlaceHeads | None:
        return None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        y = F.rms_norm(x, weight.shape, weight, eps)
        return y if residual is None else y + residual

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

    @property
    def place_heads(self) -> PlaceHeads | None:
        return None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        y: Tensor = torch.ops.actorserve.rms_norm(x, weight, eps)
        return y if residual is None else y + residual

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
