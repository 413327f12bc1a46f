"""Mixtral (Jiang et al., 2024): Llama's attention, and a mixture of experts for an MLP."""

from torch import Tensor

from workers.models.decoder import Layer, Tiles
from workers.models.experts import make_experts
from workers.models.llama import Llama, LlamaAttention
from workers.models.random_rows import RandomRows, RowProbe
from workers.weights.decoder_weights import Weights


class ExpertLayer:
    """Attention, then the experts, each added to its input."""

    def __init__(self, weights: Weights, prefix: str, attention: LlamaAttention) -> None:
        self._attention = attention
        self._mlp_norm = weights.rms_norm(f"{prefix}post_attention_layernorm")
        self._experts = make_experts(weights, f"{prefix}mlp.")
        self.heads = attention.heads

    def after_attention(self, x: Tensor, attended: Tensor, tiles: Tiles) -> Tensor:
        x, normed = tiles.run(self._after, x, attended)
        return self._experts(normed, x, tiles)

    def row_functions(self, rows: RandomRows) -> list[RowProbe]:
        return [
            self.heads.row_function(rows),
            (self._after, rows.after_attention),
            *self._experts.row_functions(rows),
        ]

    def _after(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        x = self._attention.after(x, attended)
        return x, self._mlp_norm(x)


class Mixtral(Llama):
    def make_layer(self, weights: Weights, prefix: str) -> Layer:
        return ExpertLayer(weights, prefix, LlamaAttention(weights, prefix))
