"""Qwen3 (Yang et al., 2025): Llama's decoder, with an RMSNorm on each head's query and keys."""

from torch import Tensor

from workers.models.decoder import Layer
from workers.models.llama import Llama, LlamaAttention, LlamaLayer
from workers.weights.decoder_weights import Weights


class Qwen3Attention(LlamaAttention):
    def __init__(self, weights: Weights, prefix: str) -> None:
        super().__init__(weights, prefix)
        self._query_norm = weights.rms_norm(f"{prefix}self_attn.q_norm")
        self._key_norm = weights.rms_norm(f"{prefix}self_attn.k_norm")

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        query, keys, values = self._heads(self._norm(x))
        return self._rotate(self._query_norm(query), cos, sin), self._rotate(self._key_norm(keys), cos, sin), values


class Qwen3(Llama):
    def make_layer(self, weights: Weights, prefix: str) -> Layer:
        return LlamaLayer(weights, prefix, Qwen3Attention(weights, prefix))
