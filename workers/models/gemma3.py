"""Gemma 3 (Gemma Team, 2025): norms on both sides of attention and MLP, GeGLU, and a window in most layers.

Layers with a window use another RoPE base than layers that attend to everything. Files store gains minus one; the
weights that are read here have the one added.
"""

from torch import Tensor

from workers.batch import Batch
from workers.models.blocks import GatedMlp
from workers.models.decoder import Decoder, Tiles
from workers.models.qwen3 import Qwen3Attention
from workers.models.random_rows import RandomRows, RowProbe
from workers.models.rope import rotary_table
from workers.weights.decoder_weights import Weights


class Gemma3Attention(Qwen3Attention):
    def __init__(self, weights: Weights, prefix: str) -> None:
        super().__init__(weights, prefix)
        self._after_norm = weights.rms_norm(f"{prefix}post_attention_layernorm")

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        return self._after_norm(self._out(attended.flatten(1)), residual=x)


class Gemma3Layer:
    def __init__(self, weights: Weights, prefix: str) -> None:
        self._attention = Gemma3Attention(weights, prefix)
        self._mlp_norm = weights.rms_norm(f"{prefix}pre_feedforward_layernorm")
        self._mlp = GatedMlp(weights, f"{prefix}mlp.")
        self._after_mlp_norm = weights.rms_norm(f"{prefix}post_feedforward_layernorm")
        self.heads = self._attention.heads

    def after_attention(self, x: Tensor, attended: Tensor, tiles: Tiles) -> Tensor:
        return tiles.run(self._after, x, attended)[0]

    def row_functions(self, rows: RandomRows) -> list[RowProbe]:
        return [self.heads.row_function(rows), (self._after, rows.after_attention)]

    def _after(self, x: Tensor, attended: Tensor) -> tuple[Tensor]:
        x = self._attention.after(x, attended)
        return (self._after_mlp_norm(self._mlp(self._mlp_norm(x)), residual=x),)


class Gemma3(Decoder):
    def __init__(self, weights: Weights, num_positions: int) -> None:
        config = weights.config
        everywhere = rotary_table(weights, num_positions)
        nearby = rotary_table(weights, num_positions, local=True)
        super().__init__(
            weights,
            embedding="model.embed_tokens",
            layers=[Gemma3Layer(weights, f"model.layers.{number}.") for number in range(config.num_layers)],
            rotary_of_layer=[nearby if window else everywhere for window in config.windows],
            final_norm=weights.rms_norm("model.norm"),
        )

    def embed(self, batch: Batch) -> Tensor:
        return super().embed(batch) * self.config.embedding_scale
