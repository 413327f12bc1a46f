"""The tensors of a decoder by their names in the model, and the check of a file's tensors against them."""

from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from pathlib import Path

from actorserve.errors import ModelError
from actorserve.model_files.description import DecoderConfig, TensorSpec
from actorserve.model_files.packing import Shape


def decoder_tensors(config: DecoderConfig) -> dict[str, Shape]:
    """Name -> shape of all weights of a decoder of this shape.

    Names are those in transformers' class for the architecture before any fusing (Mixtral has Qwen3-MoE's names): each
    projection and each expert is a separate tensor, and linear weights are ``[out_features, in_features]``.
    """
    tensors = _opt(config) if config.architecture == "opt" else _llama_like(config)
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return tensors


def check_tensors(
    specs: Iterable[TensorSpec], found: Mapping[str, Shape], path: Path, is_harmless: Callable[[str], bool]
) -> None:
    """Check that ``found`` has all stored tensors of ``specs``, and no other tensors except harmless ones.

    Raises: ModelError that names the first tensor that is missing, unknown, or of another shape than in the config.
    """
    stored = {part.name: part.shape for spec in specs for part in spec.parts}
    for name, shape in stored.items():
        if name not in found:
            raise ModelError(f"{path}: tensor {name} is missing")
        if found[name] != shape:
            raise ModelError(f"{path}: tensor {name} has shape {found[name]}, but the config says {shape}")
    for name in found:
        if name not in stored and not is_harmless(name):
            raise ModelError(f"{path}: tensor {name[:80]} is not one of the model's")


def part_rotary_rows(config: DecoderConfig) -> tuple[int, ...]:
    """TensorSpec's ``head_rows`` if RoPE rotates a part of each head, stored as that part's halves and then the rest.

    Empty if RoPE rotates whole heads, or none. Any order is right if queries and keys have the same order,
    because no other weights depend on it.
    """
    half, rotated = config.rotary_dim // 2, config.rotary_dim
    if rotated in (0, config.head_dim):
        return ()
    middle = rotated + config.head_dim // 2 - half
    return (*range(half), *range(rotated, middle), *range(half, rotated), *range(middle, config.head_dim))


def part_of(spec: TensorSpec, whole: str, rows: Mapping[str, int]) -> TensorSpec:
    """``spec`` with its rows in the stored tensor ``whole``, if ``whole`` contains it. Otherwise ``spec`` unchanged.

    ``rows`` maps the projections in ``whole``, such as ``q_proj``, to their numbers of rows, in order.
    """
    projection = spec.name.split(".")[-2]
    if projection not in rows:
        return spec
    *prefix, _, kind = spec.stored_name.split(".")  # for example model.layers.0.self_attn, q_proj, weight
    return spec._replace(
        stored_name=".".join([*prefix, whole, kind]),
        stored_shape=(sum(rows.values()), *spec.shape[1:]),
        first_row=sum(rows[name] for name in takewhile(lambda name: name != projection, rows)),
    )


def qkv_rows(config: DecoderConfig) -> dict[str, int]:
    """The numbers of rows of queries, keys and values, for ``part_of``."""
    keys = config.num_kv_heads * config.head_dim
    return {"q_proj": config.num_heads * config.head_dim, "k_proj": keys, "v_proj": keys}


def gate_up_rows(config: DecoderConfig) -> dict[str, int]:
    """The numbers of rows of gate and up, for ``part_of``."""
    return {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}


def _linear(name: str, rows: int, columns: int, biased: bool) -> dict[str, Shape]:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if biased else {})


def _attention(config: DecoderConfig, prefix: str, output_name: str) -> dict[str, Shape]:
    hidden, biased = config.hidden_size, config.qkv_bias
    query, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    tensors = (
        _linear(f"{prefix}q_proj", query, hidden, biased)
        | _linear(f"{prefix}k_proj", keys, hidden, biased)
        | _linear(f"{prefix}v_proj", keys, hidden, biased)
        | _linear(f"{prefix}{output_name}", hidden, query, config.attention_out_bias)
    )
    if config.qk_norm:
        tensors |= {f"{prefix}q_norm.weight": (config.head_dim,), f"{prefix}k_norm.weight": (config.head_dim,)}
    return tensors


def _gated_mlp(prefix: str, hidden: int, inner: int, biased: bool) -> dict[str, Shape]:
    return (
        _linear(f"{prefix}gate_proj", inner, hidden, biased)
        | _linear(f"{prefix}up_proj", inner, hidden, biased)
        | _linear(f"{prefix}down_proj", hidden, inner, biased)
    )


def _llama_like(config: DecoderConfig) -> dict[str, Shape]:
    hidden = config.hidden_size
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.architecture == "gemma3":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    tensors: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}{norm}.weight": (hidden,) for norm in norms}
        tensors |= _attention(config, f"{prefix}self_attn.", "o_proj")
        if not config.num_experts:
            tensors |= _gated_mlp(f"{prefix}mlp.", hidden, config.intermediate_size, config.mlp_bias)
            continue
        tensors[f"{prefix}mlp.gate.weight"] = (config.num_experts, hidden)
        for expert in range(config.num_experts):
            tensors |= _gated_mlp(f"{prefix}mlp.experts.{expert}.", hidden, config.expert_intermediate_size, False)
    return tensors


def _opt(config: DecoderConfig) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    tensors: dict[str, Shape] = {
        "model.decoder.embed_tokens.weight": (config.vocab_size, hidden),
        # The first two rows belong to no position.
        "model.decoder.embed_positions.weight": (config.max_position_embeddings + 2, hidden),
        "model.decoder.final_layer_norm.weight": (hidden,),
        "model.decoder.final_layer_norm.bias": (hidden,),
    }
    for layer in range(config.num_layers):
        prefix = f"model.decoder.layers.{layer}."
        for norm in ("self_attn_layer_norm", "final_layer_norm"):
            tensors |= {f"{prefix}{norm}.weight": (hidden,), f"{prefix}{norm}.bias": (hidden,)}
        tensors |= _attention(config, f"{prefix}self_attn.", "out_proj")
        tensors |= _linear(f"{prefix}fc1", inner, hidden, config.mlp_bias)
        tensors |= _linear(f"{prefix}fc2", hidden, inner, config.mlp_bias)
    return tensors
