"""What an iteration must move and multiply at least: the numbers that its time is compared with."""

import math
from collections.abc import Iterable

from actorserve.model_files.description import DecoderConfig, ModelDescription, TensorSpec
from workers.kernels.numerics import Numerics
from workers.kv.cache import bytes_per_token


def decode_bytes(description: ModelDescription, mode: Numerics, num_requests: int, num_context_tokens: int) -> float:
    """The bytes that a decode step reads: weights once, and each request's keys and values.

    Of the experts it reads those that at least one token chooses; random weights choose nearly evenly. A row of the
    token table for each request, activations and logits are left out, because they are a thousandth of it.
    """
    config = description.config
    weights = 0.0
    for tensor in _linear_tensors(description):
        weights += math.prod(tensor.shape) * _share_read(tensor, config, num_requests)
    kv = num_requests * num_context_tokens * bytes_per_token(config, mode.kv)
    return weights * mode.activations.itemsize + kv


def prefill_flops(description: ModelDescription, num_tokens: int) -> float:
    """The multiplications and additions of a prefill from an empty context, with the logits of its last token."""
    config = description.config
    products = 0.0
    for tensor in _linear_tensors(description):
        rows = 1 if _is_head(tensor) else num_tokens
        share = config.experts_per_token / config.num_experts if _is_expert(tensor) else 1.0
        products += rows * share * math.prod(tensor.shape)
    num_pairs = num_tokens * (num_tokens + 1) / 2
    products += 2 * config.num_layers * config.num_heads * config.head_dim * num_pairs
    return 2 * products


def _linear_tensors(description: ModelDescription) -> Iterable[TensorSpec]:
    """The weights that are multiplied with every token; a token table counts if it also makes the logits."""
    for tensor in description.tensors:
        if not tensor.name.endswith("embed_tokens.weight") or description.config.tie_word_embeddings:
            yield tensor


def _is_head(tensor: TensorSpec) -> bool:
    return tensor.name.endswith(("lm_head.weight", "embed_tokens.weight"))


def _is_expert(tensor: TensorSpec) -> bool:
    return ".experts." in tensor.name


def _share_read(tensor: TensorSpec, config: DecoderConfig, num_tokens: int) -> float:
    """The probability that any of ``num_tokens`` tokens chooses the tensor's expert; 1 for other tensors."""
    if not _is_expert(tensor):
        return 1.0
    return 1.0 - (1.0 - config.experts_per_token / config.num_experts) ** num_tokens
