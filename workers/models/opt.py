"""OPT (Zhang et al., 2022): LayerNorm before attention and MLP, learned positions, ReLU, biases throughout."""

from torch import Tensor

from workers.batch import Batch
from workers.models.blocks import Heads
from workers.models.decoder import Decoder, Tiles
from workers.models.random_rows import RandomRows, RowProbe
from workers.weights.decoder_weights import Weights

_FIRST_POSITION = 2  # the table's first rows belong to no position


class OptLayer:
    def __init__(self, weights: Weights, prefix: str) -> None:
        self.heads = Heads(weights, f"{prefix}self_attn.", weights.layer_norm(f"{prefix}self_attn_layer_norm"))
        self._out = weights.linear(f"{prefix}self_attn.out_proj")
        self._mlp_norm = weights.layer_norm(f"{prefix}final_layer_norm")
        self._up = weights.linear(f"{prefix}fc1")
        self._down = weights.linear(f"{prefix}fc2")

    def after_attention(self, x: Tensor, attended: Tensor, tiles: Tiles) -> Tensor:
        return tiles.run(self._after, x, attended)[0]

    def row_functions(self, rows: RandomRows) -> list[RowProbe]:
        return [self.heads.row_function(rows), (self._after, rows.after_attention)]

    def _after(self, x: Tensor, attended: Tensor) -> tuple[Tensor]:
        x = self._out(attended.flatten(1), residual=x)
        return (self._down(self._up(self._mlp_norm(x)).relu(), residual=x),)


class Opt(Decoder):
    def __init__(self, weights: Weights, num_positions: int) -> None:
        root = "model.decoder."
        num_layers = weights.config.num_layers
        self._positions = weights.table(f"{root}embed_positions")[: _FIRST_POSITION + num_positions]
        super().__init__(
            weights,
            embedding=f"{root}embed_tokens",
            layers=[OptLayer(weights, f"{root}layers.{number}.") for number in range(num_layers)],
            rotary_of_layer=(),
            final_norm=weights.layer_norm(f"{root}final_layer_norm"),
        )

    def embed(self, batch: Batch) -> Tensor:
        positions = self._positions.index_select(0, batch.positions + _FIRST_POSITION)
        return super().embed(batch) + positions.to(self._dtype)
