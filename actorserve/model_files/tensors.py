"""The tensors that a decoder is made of: their names in both formats, and their shapes."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from actorserve.errors import ModelError
from actorserve.model_files.description import DecoderConfig


class TensorSpec(NamedTuple):
    """One weight: its name in a Hugging Face folder and in a GGUF file, and its row-major shape."""

    hf_name: str
    gguf_name: str
    shape: tuple[int, ...]


def decoder_tensors(config: DecoderConfig) -> list[TensorSpec]:
    """All tensors that a decoder of this shape needs; linear weights are ``[out_features, in_features]``."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    specs = [
        TensorSpec("model.embed_tokens.weight", "token_embd.weight", (config.vocab_size, hidden)),
        TensorSpec("model.norm.weight", "output_norm.weight", (hidden,)),
    ]
    if not config.tie_word_embeddings:
        specs.append(TensorSpec("lm_head.weight", "output.weight", (config.vocab_size, hidden)))
    linears = (
        ("self_attn.q_proj", "attn_q", query, hidden, config.attention_bias),
        ("self_attn.k_proj", "attn_k", keys, hidden, config.attention_bias),
        ("self_attn.v_proj", "attn_v", keys, hidden, config.attention_bias),
        ("self_attn.o_proj", "attn_output", hidden, query, config.attention_bias),
        ("mlp.gate_proj", "ffn_gate", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", "ffn_up", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", "ffn_down", hidden, inner, config.mlp_bias),
    )
    for layer in range(config.num_layers):
        hf, gguf = f"model.layers.{layer}.", f"blk.{layer}."
        specs.append(TensorSpec(f"{hf}input_layernorm.weight", f"{gguf}attn_norm.weight", (hidden,)))
        specs.append(TensorSpec(f"{hf}post_attention_layernorm.weight", f"{gguf}ffn_norm.weight", (hidden,)))
        for hf_name, gguf_name, rows, columns, biased in linears:
            specs.append(TensorSpec(f"{hf}{hf_name}.weight", f"{gguf}{gguf_name}.weight", (rows, columns)))
            if biased:
                specs.append(TensorSpec(f"{hf}{hf_name}.bias", f"{gguf}{gguf_name}.bias", (rows,)))
    return specs


def check_tensors(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Raises: ModelError, naming the first tensor that is missing or has another shape than the config says."""
    for name, shape in expected.items():
        if name not in found:
            raise ModelError(f"{path}: tensor {name} is missing")
        if found[name] != shape:
            raise ModelError(f"{path}: tensor {name} has shape {found[name]}, where the config says {shape}")
