"""Makes the decoder's config from config.json: one function per family of models, because their keys differ.

An absent key has the default of transformers' class for the model.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from actorserve.model_files.description import Activation, Architecture, DecoderConfig
from actorserve.model_files.hf_rope import read_rope
from actorserve.model_files.values import MAX_LAYERS, Values, unsupported_architecture

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_GATED = ("silu", "swish", "gelu_pytorch_tanh")
_LAYER_KINDS = {"full_attention", "sliding_attention"}
_DEFAULT_WINDOW = 4096
# Published files with a vision tower omit these keys from their text_config.
_GEMMA3_DEFAULTS: dict[str, object] = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
}


def decoder_config(raw: Mapping[str, object], path: Path) -> DecoderConfig:
    """The decoder that ``raw``, the content of ``path``, describes.

    Raises: ModelError that names the key and value that is missing, damaged or not supported.
    """
    values = Values(raw, path)
    model_type = values.text("model_type")
    if model_type not in _FAMILIES:
        raise unsupported_architecture(model_type, _FAMILIES, path)
    config = _FAMILIES[model_type](values)
    if config.rotary_dim < config.head_dim and model_type not in ("phi3", "opt"):
        raise values.error(f"RoPE over a part of each head is not supported for {model_type}")
    return config


def _common(
    values: Values, architecture: Architecture, rope_parameters: Mapping[str, object] | None = None
) -> DecoderConfig:
    """The config that all families except OPT begin with: full attention in every layer, and no biases."""
    hidden_size = values.integer("hidden_size")
    num_heads = values.integer("num_attention_heads")
    head_dim = values.integer("head_dim", hidden_size // num_heads)
    num_layers = values.integer("num_hidden_layers", maximum=MAX_LAYERS)
    if rope_parameters is None:
        rope_parameters = values.mapping("rope_parameters", {})
    rope = read_rope(values, head_dim, rope_parameters)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=values.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=values.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=values.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        norm_eps=values.number("rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rotary_dim=rope.rotary_dim,
        max_position_embeddings=values.integer("max_position_embeddings"),
        tie_word_embeddings=values.flag("tie_word_embeddings", False),
        windows=(0,) * num_layers,
        query_scale=head_dim**-0.5,
        activation=_activation(values, "hidden_act", "silu"),
    )


def _llama(values: Values) -> DecoderConfig:
    biased = values.flag("attention_bias", False)
    return replace(
        _common(values, "llama"),
        qkv_bias=biased,
        attention_out_bias=biased,
        mlp_bias=values.flag("mlp_bias", False),
    )


def _mistral(values: Values) -> DecoderConfig:
    config = _common(values, "llama")
    return replace(config, windows=_windows(values, config, _DEFAULT_WINDOW, lambda _: True))


def _qwen2(values: Values) -> DecoderConfig:
    config = _common(values, "llama")
    return replace(config, qkv_bias=True, windows=_later_windows(values, config))


def _qwen3(values: Values) -> DecoderConfig:
    config = _common(values.with_defaults({"head_dim": 128}), "qwen3")
    biased = values.flag("attention_bias", False)
    windows = _later_windows(values, config)
    return replace(config, qkv_bias=biased, attention_out_bias=biased, qk_norm=True, windows=windows)


def _qwen3_moe(values: Values) -> DecoderConfig:
    if values.integer("decoder_sparse_step", 1) != 1:
        raise values.unsupported("decoder_sparse_step", values.integer("decoder_sparse_step"), (1,))
    if values.has("mlp_only_layers") and values.integers("mlp_only_layers"):
        raise values.unsupported("mlp_only_layers", values.integers("mlp_only_layers"), ("[]",))
    config = _common(values, "qwen3_moe")
    windows = config.windows
    if values.flag("use_sliding_window", False):
        windows = _windows(values, config, _DEFAULT_WINDOW, lambda _: True)
    biased = values.flag("attention_bias", False)
    # transformers 5 renamed this key.
    count_key = "num_local_experts" if values.has("num_local_experts") else "num_experts"
    return replace(
        config,
        qkv_bias=biased,
        attention_out_bias=biased,
        qk_norm=True,
        windows=windows,
        num_experts=values.integer(count_key),
        experts_per_token=values.integer("num_experts_per_tok"),
        expert_intermediate_size=values.integer("moe_intermediate_size"),
        normalize_expert_weights=values.flag("norm_topk_prob", False),
    )


def _mixtral(values: Values) -> DecoderConfig:
    config = _common(values, "mixtral")
    return replace(
        config,
        windows=_windows(values, config, None, lambda _: True),
        num_experts=values.integer("num_local_experts"),
        experts_per_token=values.integer("num_experts_per_tok"),
        expert_intermediate_size=config.intermediate_size,
        normalize_expert_weights=True,
    )


def _phi3(values: Values) -> DecoderConfig:
    config = _common(values, "llama")
    return replace(config, windows=_windows(values, config, None, lambda _: True))


def _gemma3_text(values: Values) -> DecoderConfig:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if values.has(key):
            raise values.unsupported(key, values.number(key), ("null",))
    if values.flag("use_bidirectional_attention", False):
        raise values.unsupported("use_bidirectional_attention", True, (False,))
    values = values.with_defaults(_GEMMA3_DEFAULTS)
    # Newer files have RoPE parameters per kind of layer. Older files have two bases, and a scaling for full attention.
    pattern = values.integer("sliding_window_pattern", 6)
    kinds = values.mapping("rope_parameters", {})
    if "full_attention" not in kinds:
        kinds = {
            "full_attention": kinds,
            "sliding_attention": {"rope_theta": values.number("rope_local_base_freq", 1e4)},
        }
    config = _common(values, "gemma3", values.of(kinds).mapping("full_attention"))
    local = values.of(values.of(kinds).mapping("sliding_attention", {}))
    if local.text("rope_type", "default") != "default":
        raise values.unsupported("sliding_attention's rope_type", local.text("rope_type"), ("default",))
    biased = values.flag("attention_bias", False)
    return replace(
        config,
        local_rope_theta=local.number("rope_theta", 1e4),
        activation=_activation(values, "hidden_activation", "gelu_pytorch_tanh"),
        windows=_windows(values, config, _DEFAULT_WINDOW, lambda layer: (layer + 1) % pattern != 0),
        query_scale=values.number("query_pre_attn_scalar", 256.0) ** -0.5,
        qkv_bias=biased,
        attention_out_bias=biased,
        qk_norm=True,
        embedding_scale=config.hidden_size**0.5,
    )


def _gemma3(values: Values) -> DecoderConfig:
    """The text decoder of a model that also has a vision tower."""
    return _gemma3_text(values.of(values.mapping("text_config")))


def _opt(values: Values) -> DecoderConfig:
    hidden_size = values.integer("hidden_size")
    num_heads = values.integer("num_attention_heads")
    num_layers = values.integer("num_hidden_layers", maximum=MAX_LAYERS)
    for key, usual in (
        ("do_layer_norm_before", True),
        ("layer_norm_elementwise_affine", True),
        ("_remove_final_layer_norm", False),
    ):
        if values.flag(key, usual) is not usual:
            raise values.unsupported(key, not usual, (usual,))
    # OPT-350m's embeddings are narrower than its layers.
    if values.integer("word_embed_proj_dim", hidden_size) != hidden_size:
        raise values.unsupported("word_embed_proj_dim", values.integer("word_embed_proj_dim"), (hidden_size,))
    if hidden_size % num_heads:
        raise values.error(f"{num_heads} heads do not divide {hidden_size} dimensions evenly")
    biased = values.flag("enable_bias", True)
    return DecoderConfig(
        architecture="opt",
        vocab_size=values.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=values.integer("ffn_dim"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        norm_eps=1e-5,  # torch's default; the config has no such key
        rope_theta=1e4,
        rotary_dim=0,  # positions are learned
        max_position_embeddings=values.integer("max_position_embeddings"),
        tie_word_embeddings=values.flag("tie_word_embeddings", True),
        windows=(0,) * num_layers,
        query_scale=(hidden_size // num_heads) ** -0.5,
        activation=_activation(values, "activation_function", "relu", ("relu",)),
        qkv_bias=biased,
        attention_out_bias=biased,
        mlp_bias=biased,
    )


def _activation(values: Values, key: str, default: str, supported: Iterable[str] = _GATED) -> Activation:
    name = values.text(key, default)
    if name not in supported:
        raise values.unsupported(key, name, supported)
    return _ACTIVATIONS[name]


def _windows(
    values: Values, config: DecoderConfig, default: int | None, is_sliding: Callable[[int], bool]
) -> tuple[int, ...]:
    """The window of every layer. Without ``layer_types`` in the config, ``is_sliding`` tells which layers have one."""
    if values.is_null("sliding_window") or (default is None and not values.has("sliding_window")):
        return config.windows
    window = values.integer("sliding_window", default)
    kinds = values.texts("layer_types") if values.has("layer_types") else []
    if kinds and (len(kinds) != config.num_layers or not set(kinds) <= _LAYER_KINDS):
        raise values.error(f"layer_types must name {config.num_layers} of {', '.join(sorted(_LAYER_KINDS))}")
    sliding = [kind == "sliding_attention" for kind in kinds] or [
        is_sliding(layer) for layer in range(config.num_layers)
    ]
    return tuple(window if has_window else 0 for has_window in sliding)


def _later_windows(values: Values, config: DecoderConfig) -> tuple[int, ...]:
    """Qwen's windows: the first layers have none, and no layer has one unless the config says so."""
    if not values.flag("use_sliding_window", False):
        return config.windows
    first = values.integer("max_window_layers", 28, minimum=0)
    return _windows(values, config, _DEFAULT_WINDOW, lambda layer: layer >= first)


_FAMILIES: dict[str, Callable[[Values], DecoderConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "phi3": _phi3,
    "gemma3_text": _gemma3_text,
    "gemma3": _gemma3,
    "opt": _opt,
}
