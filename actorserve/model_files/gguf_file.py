"""Describes a GGUF file: its metadata's names brought to the decoder's config."""

import re
from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType

from actorserve.errors import ModelError
from actorserve.model_files.description import SUPPORTED_ARCHITECTURES, DecoderConfig, ModelDescription
from actorserve.model_files.gguf_reader import GgufFile, read_gguf
from actorserve.model_files.tensors import check_tensors, decoder_tensors
from actorserve.model_files.values import Values, check_config, unsupported_architecture

_QUANTIZATION_SUFFIX = re.compile(r"[.-](?:I?Q\d\w*|BF16|F16|F32)$", re.IGNORECASE)
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def describe_gguf(path: Path) -> ModelDescription:
    """Read a GGUF file's header (milliseconds per ten thousand tokens; no tensor data but RoPE's factors).

    Raises: ModelError, when it is damaged, truncated, inconsistent, or of an architecture that is not supported.
    """
    file = read_gguf(path)
    architecture = Values(file.metadata, path).text("general.architecture")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise unsupported_architecture(architecture, path)
    config = check_config(_decoder_config(file, path, Values(file.metadata, path, f"{architecture}.")), path)
    expected = {spec.gguf_name: spec.shape for spec in decoder_tensors(config)}
    check_tensors(expected, {name: tensor.shape for name, tensor in file.tensors.items()}, path)
    tokenizer = Values(file.metadata, path, "tokenizer.ggml.")
    tokens = tokenizer.texts("tokens")
    if len(tokens) > config.vocab_size:
        raise ModelError(f"{path}: {len(tokens)} tokens, but embeddings for {config.vocab_size}")
    last_id = len(tokens) - 1
    special_ids = {
        f"{name}_token": tokenizer.integer(f"{key}_token_id", minimum=0, maximum=last_id)
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if tokenizer.has(f"{key}_token_id")
    }
    ends = [tokenizer.integer(key, minimum=0, maximum=last_id) for key in _END_KEYS if tokenizer.has(key)]
    template = Values(file.metadata, path, "tokenizer.")
    return ModelDescription(
        name=_QUANTIZATION_SUFFIX.sub("", path.stem),
        path=path,
        format="gguf",
        config=config,
        weight_files=(path,),
        eos_token_ids=tuple(dict.fromkeys(ends)),
        bos_token_id=special_ids.get("bos_token"),
        chat_template=template.text("chat_template") if template.has("chat_template") else None,
        special_tokens={name: tokens[token_id] for name, token_id in special_ids.items()},
        tokenizer_metadata={key: value for key, value in file.metadata.items() if key.startswith("tokenizer.ggml.")},
    )


def _decoder_config(file: GgufFile, path: Path, values: Values) -> DecoderConfig:
    if values.integer("expert_count", 0, minimum=0):
        raise ModelError(f"{path}: mixtures of experts are not supported")
    embeddings = file.tensors.get("token_embd.weight")
    if embeddings is None:
        raise ModelError(f"{path}: tensor token_embd.weight is missing")
    hidden_size = values.integer("embedding_length")
    num_heads = values.integer("attention.head_count")
    head_dim = values.integer("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if values.integer(key, head_dim) != head_dim:
            raise ModelError(f"{path}: {key} {values.integer(key)} other than the head size {head_dim} is unsupported")
    context_length = values.integer("context_length")
    return DecoderConfig(
        architecture="llama",
        vocab_size=embeddings.shape[0],
        hidden_size=hidden_size,
        intermediate_size=values.integer("feed_forward_length"),
        num_layers=values.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=values.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=values.number("attention.layer_norm_rms_epsilon"),
        rope_theta=values.number("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(file, path, values, context_length, head_dim),
        max_position_embeddings=context_length,
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
    )


def _rope_scaling(
    file: GgufFile, path: Path, values: Values, context_length: int, head_dim: int
) -> dict[str, object] | None:
    rope_type = values.text("rope.scaling.type", "none")
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None:
        if factors.type != GGMLQuantizationType.F32 or factors.shape != (head_dim // 2,):
            raise ModelError(f"{path}: tensor rope_freqs.weight is not {head_dim // 2} float32 numbers")
        if rope_type != "none":
            raise ModelError(f"{path}: RoPE scaling {rope_type[:40]!r} together with rope_freqs.weight is unsupported")
        numbers = np.fromfile(path, "<f4", head_dim // 2, offset=factors.offset)
        if not (np.isfinite(numbers).all() and (numbers > 0).all()):
            raise ModelError(f"{path}: tensor rope_freqs.weight holds numbers that are not positive")
        return {"rope_type": "factors", "factors": tuple(numbers.tolist())}
    if rope_type == "none":
        # Older files write a linear factor without naming the type.
        factor = values.number("rope.scale_linear", 1.0)
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    factor = values.number("rope.scaling.factor")
    if rope_type == "linear":
        return {"rope_type": "linear", "factor": factor}
    if rope_type == "yarn":
        original = values.integer("rope.scaling.original_context_length", context_length)
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ModelError(f"{path}: RoPE scaling {rope_type[:40]!r} is not supported; supported: linear, yarn")
