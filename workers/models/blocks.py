"""Parts that several decoders share. R rows are any tokens, T rows are all tokens of a step."""

from collections.abc import Callable

from torch import Tensor

from actorserve.errors import ModelError
from workers.batch import Batch
from workers.kernels.row_ops import Activation, HeadGains
from workers.kv.cache import KVCache
from workers.models.random_rows import RandomRows, RowProbe
from workers.weights.decoder_weights import Norm, Weights

Run = Callable[..., tuple[Tensor, ...]]
"""Runs a token-wise function over all rows of the inputs that follow it (``workers.models.decoder.Tiles.run``)."""


class Heads:
    """Computes query, keys and values: a norm, one linear layer, the norms of heads if there are any, and rotation."""

    def __init__(self, weights: Weights, prefix: str, norm: Norm, gains: HeadGains | None = None) -> None:
        config = weights.config
        self._norm = norm
        self._linear = weights.linear(*(f"{prefix}{name}" for name in ("q_proj", "k_proj", "v_proj")))
        self._gains = gains
        self._ops = weights.row_ops
        self._head_dim = config.head_dim
        self._sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)

    def run(self, x: Tensor, angles: tuple[Tensor, ...], batch: Batch, cache: KVCache, layer: int, run: Run) -> Tensor:
        """[T, hidden] -> query [T, num_heads, head_dim]; keys and values are stored as those of ``layer``.

        ``angles``: the positions' cosines and sines, [T, 1, head_dim / 2] each, or nothing without RoPE. ``run`` runs
        a token-wise function.
        """
        place = self._ops.place_heads
        if place is None:
            query, keys, values = run(self._compute, x, *angles)
            cache.write(layer, batch, keys, values)
            return query
        (heads,) = run(self._project, x)
        return place(heads, angles, self._gains, batch.slots, *cache.layers[layer])

    def row_function(self, rows: RandomRows) -> RowProbe:
        """The token-wise function that ``run`` uses."""
        if self._ops.place_heads is None:
            return self._compute, rows.before_attention
        return self._project, rows.hidden

    def _project(self, x: Tensor) -> tuple[Tensor]:
        """[R, hidden] -> [R, num_heads + 2 * num_kv_heads, head_dim]: query, keys and values."""
        return (self._linear(self._norm(x)).view(len(x), -1, self._head_dim),)

    def _compute(self, x: Tensor, *angles: Tensor) -> tuple[Tensor, ...]:
        """[R, hidden] -> query [R, num_heads, head_dim], keys and values [R, num_kv_heads, head_dim]."""
        query, keys, values = self._project(x)[0].split_with_sizes(self._sizes, dim=1)
        if self._gains is not None:
            query = self._ops.rms_norm(query, self._gains.query, self._gains.eps)
            keys = self._ops.rms_norm(keys, self._gains.key, self._gains.eps)
        if angles:
            query, keys = self._ops.rotate(query, *angles), self._ops.rotate(keys, *angles)
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
