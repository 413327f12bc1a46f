"""The Llama family (Touvron et al., 2023): RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

Mistral and SmolLM2 differ only in their sizes, Qwen2 has biases, and Phi-3's files fuse some tensors.
"""

from torch import Tensor

from workers.kernels.row_ops import HeadGains
from workers.models.blocks import GatedMlp, Heads
from workers.models.decoder import Decoder, Layer, Tiles
from workers.models.random_rows import RandomRows, RowProbe
from workers.models.rope import rotary_table
from workers.weights.decoder_weights import Weights


class LlamaAttention:
    """The token-wise parts of attention: before and after tokens attend."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        norm = weights.rms_norm(f"{prefix}input_layernorm")
        self.heads = Heads(weights, f"{prefix}self_attn.", norm, self.head_gains(weights, f"{prefix}self_attn."))
        self._out = weights.linear(f"{prefix}self_attn.o_proj")

    def head_gains(self, weights: Weights, prefix: str) -> HeadGains | None:
        """The norms on heads, which this family does not have."""
        return None

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        return self._out(attended.flatten(1), residual=x)


class LlamaLayer:
    """Attention, then the MLP, each added to its input."""

    def __init__(self, weights: Weights, prefix: str, attention: LlamaAttention) -> None:
        self._attention = attention
        self._mlp_norm = weights.rms_norm(f"{prefix}post_attention_layernorm")
        self._mlp = GatedMlp(weights, f"{prefix}mlp.")
        self.heads = attention.heads

    def after_attention(self, x: Tensor, attended: Tensor, tiles: Tiles) -> Tensor:
        return tiles.run(self._after, x, attended)[0]

    def row_functions(self, rows: RandomRows) -> list[RowProbe]:
        return [self.heads.row_function(rows), (self._after, rows.after_attention)]

    def _after(self, x: Tensor, attended: Tensor) -> tuple[Tensor]:
        x = self._attention.after(x, attended)
        return (self._mlp(self._mlp_norm(x), residual=x),)


class Llama(Decoder):
    """The decoder, and the base of decoders that differ only in their layers."""

    def __init__(self, weights: Weights, num_positions: int) -> None:
        num_layers = weights.config.num_layers
        super().__init__(
            weights,
            embedding="model.embed_tokens",
            layers=[self.make_layer(weights, f"model.layers.{number}.") for number in range(num_layers)],
            rotary_of_layer=[rotary_table(weights, num_positions)] * num_layers,
            final_norm=weights.rms_norm("model.norm"),
        )

    def make_layer(self, weights: Weights, prefix: str) -> Layer:
        return LlamaLayer(weights, prefix, LlamaAttention(weights, prefix))
