"""Qwen3 (Yang et al., 2025): Llama's decoder, with an RMSNorm on each head's query and keys."""

from workers.kernels.row_ops import HeadGains
from workers.models.decoder import Layer
from workers.models.llama import Llama, LlamaAttention, LlamaLayer
from workers.weights.decoder_weights import Weights


class Qwen3Attention(LlamaAttention):
    def head_gains(self, weights: Weights, prefix: str) -> HeadGains:
        return HeadGains(weights.gain(f"{prefix}q_norm"), weights.gain(f"{prefix}k_norm"), weights.config.norm_eps)


class Qwen3(Llama):
    def make_layer(self, weights: Weights, prefix: str) -> Layer:
        return LlamaLayer(weights, prefix, Qwen3Attention(weights, prefix))
