"""Makes the decoder's config from a GGUF file's metadata, which uses llama.cpp's names."""

from dataclasses import replace
from pathlib import Path

from actorserve.errors import ModelError
from actorserve.model_files.description import Architecture, DecoderConfig
from actorserve.model_files.gguf_reader import GgufFile
from actorserve.model_files.gguf_rope import read_rope
from actorserve.model_files.values import MAX_LAYERS, Values, unsupported_architecture

_ARCHITECTURES: dict[str, Architecture] = {
    "llama": "llama",
    "qwen2": "llama",
    "phi3": "llama",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma3": "gemma3",
}
_GEMMA3_27B_LAYERS = 62


def decoder_config(file: GgufFile, path: Path, architecture: str) -> DecoderConfig:
    """The decoder that a file of llama.cpp's ``architecture`` describes.

    Raises: ModelError that names the key and value that is missing, damaged or not supported.
    """
    if architecture == "opt":
        raise ModelError(f"{path}: llama.cpp has no architecture 'opt', so its tensors are unknown; give a folder")
    if architecture not in _ARCHITECTURES:
        raise unsupported_architecture(architecture, _ARCHITECTURES, path)
    values = Values(file.metadata, path, f"{architecture}.")
    config = _common(file, path, values, _ARCHITECTURES[architecture])
    if config.rotary_dim != config.head_dim and architecture != "phi3":
        raise values.unsupported("rope.dimension_count", config.rotary_dim, (config.head_dim,))
    if architecture == "gemma3":
        return _gemma3(config, values)
    window = values.integer("attention.sliding_window", 0, minimum=0)
    config = replace(config, windows=(window,) * config.num_layers, qk_norm=config.architecture.startswith("qwen3"))
    if architecture == "qwen3moe":
        return _with_experts(config, values, values.integer("expert_feed_forward_length", 0, minimum=0))
    if architecture == "llama" and values.integer("expert_count", 0, minimum=0):
        return _with_experts(replace(config, architecture="mixtral"), values, config.intermediate_size)
    return config


def _common(file: GgufFile, path: Path, values: Values, architecture: Architecture) -> DecoderConfig:
    embeddings = file.tensors.get("token_embd.weight")
    if embeddings is None:
        raise ModelError(f"{path}: tensor token_embd.weight is missing")
    hidden_size = values.integer("embedding_length")
    num_heads = values.integer("attention.head_count")
    head_dim = values.integer("attention.key_length", hidden_size // num_heads)
    if values.integer("attention.value_length", head_dim) != head_dim:
        raise values.unsupported("attention.value_length", values.integer("attention.value_length"), (head_dim,))
    num_layers = values.integer("block_count", maximum=MAX_LAYERS)
    rope = read_rope(file, path, values, head_dim)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=embeddings.shape[0],
        hidden_size=hidden_size,
        intermediate_size=values.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=values.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        norm_eps=values.number("attention.layer_norm_rms_epsilon"),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rotary_dim=rope.rotary_dim,
        max_position_embeddings=values.integer("context_length"),
        tie_word_embeddings="output.weight" not in file.tensors,
        windows=(0,) * num_layers,
        query_scale=head_dim**-0.5,
        qkv_bias="blk.0.attn_q.bias" in file.tensors or "blk.0.attn_qkv.bias" in file.tensors,
        attention_out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
    )


def _with_experts(config: DecoderConfig, values: Values, inner: int) -> DecoderConfig:
    used = values.integer("expert_used_count")
    if not inner and config.intermediate_size % used:
        raise values.error("expert_feed_forward_length is missing")
    return replace(
        config,
        num_experts=values.integer("expert_count"),
        experts_per_token=used,
        expert_intermediate_size=inner or config.intermediate_size // used,
        normalize_expert_weights=True,
    )


def _gemma3(config: DecoderConfig, values: Values) -> DecoderConfig:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if values.has(key):
            raise values.unsupported(key, values.number(key), ("none",))
    window = values.integer("attention.sliding_window", 0, minimum=0)
    period = values.integer("attention.sliding_window_pattern", 6)
    # The format has no key for the query scale. As in llama.cpp, the only exceptional model is found by its depth.
    scaled_dim = config.hidden_size // config.num_heads if config.num_layers == _GEMMA3_27B_LAYERS else config.head_dim
    return replace(
        config,
        local_rope_theta=values.number("rope.freq_base_swa", 1e4),
        activation="gelu_tanh",
        windows=tuple(window if (layer + 1) % period else 0 for layer in range(config.num_layers)),
        query_scale=scaled_dim**-0.5,
        qk_norm=True,
        embedding_scale=config.hidden_size**0.5,
    )
