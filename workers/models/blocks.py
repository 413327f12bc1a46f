"""Parts that several decoders share. R rows are any tokens; everything here is token-wise."""

from torch import Tensor

from actorserve.errors import ModelError
from workers.kernels.row_ops import Activation
from workers.weights.decoder_weights import Weights


class Heads:
    """Computes query, keys and values by one linear layer."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        config = weights.config
        self._linear = weights.linear(*(f"{prefix}{name}" for name in ("q_proj", "k_proj", "v_proj")))
        self._head_dim = config.head_dim
        self._sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[R, hidden] -> query [R, num_heads, head_dim], keys and values [R, num_kv_heads, head_dim]."""
        heads = self._linear(x).view(len(x), -1, self._head_dim)
        query, keys, values = heads.split_with_sizes(self._sizes, dim=1)
        return query, keys, values


class GatedMlp:
    """``down(activation(gate(x)) * up(x))`` (Shazeer, "GLU variants improve transformer", 2020)."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        """Raises: ModelError, also if the activation cannot gate."""
        activation = weights.config.activation
        if activation == "relu":
            raise ModelError("an MLP gated by ReLU is not supported")
        self._gate_up = weights.linear(f"{prefix}gate_proj", f"{prefix}up_proj")
        self._down = weights.linear(f"{prefix}down_proj")
        self._activation: Activation = activation
        self._gated = weights.row_ops.gated

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[R, hidden] -> [R, hidden], plus ``residual``."""
        return self._down(self._gated(self._gate_up(x), self._activation), residual)

    def rows(self, x: Tensor) -> tuple[Tensor]:
        """The same as a ``RowFunction``."""
        return (self(x),)
