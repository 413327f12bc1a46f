"""The frame of all decoders: embedding, layer after layer, final norm and output layer."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from workers.attention import Attention
from workers.batch import Batch
from workers.kernels.tiles import RowFunction
from workers.kv.cache import KVCache
from workers.models.blocks import Heads
from workers.models.random_rows import RandomRows, RowProbe
from workers.models.rope import RotaryTable
from workers.weights.decoder_weights import Norm, Weights


class Tiles(Protocol):
    """Runs token-wise functions in tiles, so that a row's bits do not depend on the number of rows."""

    def run(self, function: RowFunction, *inputs: Tensor) -> tuple[Tensor, ...]: ...


class Layer(Protocol):
    """One layer. R rows are any tokens, T rows are all tokens of a step."""

    @property
    def heads(self) -> Heads: ...

    def after_attention(self, x: Tensor, attended: Tensor, tiles: Tiles) -> Tensor:
        """[T, hidden] and [T, num_heads, head_dim] -> [T, hidden]."""
        ...

    def row_functions(self, rows: RandomRows) -> list[RowProbe]:
        """The token-wise functions that the layer runs in tiles."""
        ...


class Decoder:
    """Embedding, layers, norm and output. The models define the layers."""

    def __init__(
        self,
        weights: Weights,
        embedding: str,
        layers: Sequence[Layer],
        rotary_of_layer: Sequence[RotaryTable],
        final_norm: Norm,
    ) -> None:
        """``embedding``: the name of its weight. ``rotary_of_layer``: one for each layer, or empty without RoPE."""
        self.config = weights.config
        self.layers = tuple(layers)
        self._dtype = weights.dtype
        self._embedding, self._output = weights.embedding_and_output(embedding, "lm_head")
        self._rotary_of_layer = tuple(rotary_of_layer)
        self._windows = tuple(window or None for window in self.config.windows)
        self._final_norm = final_norm
        self._random_rows = RandomRows(self.config, weights.device, weights.dtype)

    def forward(
        self,
        batch: Batch,
        cache: KVCache,
        attention: Attention,
        tiles: Tiles,
        report: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Hidden states of the batch's tokens, [T, hidden]; their keys and values are written to the cache. ``report``
        is called with the number of layers for which that is done, or launched.
        """
        x, batches = self.embed(batch), batch.of_group
        angles = self._angles(batch.positions)
        for number, (layer, window) in enumerate(zip(self.layers, self._windows, strict=True)):
            of_group = batches[cache.group_of[number]]
            query = layer.heads.run(x, angles[number], of_group, cache, number, tiles.run)
            if report is not None:
                report(number + 1)
            attended = attention(query, *cache.layers[number], of_group, window)
            x = layer.after_attention(x, attended, tiles)
        return x

    def embed(self, batch: Batch) -> Tensor:
        """The input of the first layer, [T, hidden]."""
        return self._embedding.index_select(0, batch.token_ids).to(self._dtype)

    def logits(self, x: Tensor) -> tuple[Tensor]:
        """[R, hidden] -> [R, vocab_size] float32; also a token-wise function."""
        return (self._output(self._final_norm(x)).float(),)

    def row_functions(self) -> list[RowProbe]:
        """The functions that ``forward`` runs in tiles: the first layer's, because all layers have the same shapes."""
        return self.layers[0].row_functions(self._random_rows)

    def head_function(self) -> RowProbe:
        return self.logits, self._random_rows.hidden

    def _angles(self, positions: Tensor) -> list[tuple[Tensor, ...]]:
        """Each layer's cosines and sines."""
        if not self._rotary_of_layer:
            return [()] * len(self.layers)
        angles = {rotary: rotary(positions) for rotary in dict.fromkeys(self._rotary_of_layer)}
        return [angles[rotary] for rotary in self._rotary_of_layer]
