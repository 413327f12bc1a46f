"""Qwen3's mixture of experts (Yang et al., 2025): Qwen3's attention, Mixtral's experts."""

from workers.models.decoder import Layer
from workers.models.llama import Llama
from workers.models.mixtral import ExpertLayer
from workers.models.qwen3 import Qwen3Attention
from workers.weights.decoder_weights import Weights


class Qwen3Moe(Llama):
    def make_layer(self, weights: Weights, prefix: str) -> Layer:
        return ExpertLayer(weights, prefix, Qwen3Attention(weights, prefix))
