"""Small model files for tests: a GGUF writer (the gguf package's) and a Hugging Face folder."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import quant_shape_to_byte_shape
from safetensors.numpy import save_file

from actorserve.model_files.description import DecoderConfig
from actorserve.model_files.gguf_tensors import stored_tensors as gguf_tensors
from actorserve.model_files.tensors import decoder_tensors

SENTENCEPIECE_TOKENS = (
    ["<unk>", "<s>", "</s>"]
    + [f"<0x{byte:02X}>" for byte in range(256)]
    + [
        "▁",
        "h",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
        "he",
        "ll",
        "hell",
        "hello",
        "▁hello",
        "▁w",
        "or",
        "▁wor",
        "ld",
        "▁world",
    ]
)
SENTENCEPIECE_TYPES = [2, 3, 3] + [6] * 256 + [1] * (len(SENTENCEPIECE_TOKENS) - 259)


def tiny_config(**changes: object) -> DecoderConfig:
    """A decoder of a few hundred weights, whose vocabulary is SENTENCEPIECE_TOKENS."""
    values: dict[str, object] = {
        "architecture": "llama",
        "vocab_size": len(SENTENCEPIECE_TOKENS),
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 4,
        "norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rotary_dim": 4,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "windows": (0, 0),
        "query_scale": 0.5,
    }
    return DecoderConfig(**(values | changes))  # type: ignore[arg-type]


def write_gguf(
    path: Path,
    config: DecoderConfig | None = None,
    *,
    architecture: str = "llama",
    metadata: Mapping[str, int | float | str] | None = None,
    factors: Mapping[str, list[float]] | None = None,
    extra_tensor: str = "",
    without_tensor: str = "",
    num_parts: int = 1,
    gate_type: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> Path:
    """A complete GGUF file with a SentencePiece vocabulary; weights are zeros.

    ``metadata`` is added to the keys of every file; its keys omit the architecture's name. ``factors`` are tensors of
    one dimension. ``gate_type`` is the type of blk.0.ffn_gate.weight.
    """
    config = config or tiny_config()
    writer = GGUFWriter(path, architecture)
    values: dict[str, int | float | str] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.dimension_count": config.rotary_dim,
        "rope.freq_base": config.rope_theta,
    }
    for key, value in (values | dict(metadata or {})).items():
        kind = {int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}[type(value)]
        writer.add_key_value(f"{architecture}.{key}", value, kind)
    writer.add_uint16("split.count", num_parts)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(SENTENCEPIECE_TOKENS)
    writer.add_token_scores([float(len(token)) for token in SENTENCEPIECE_TOKENS])
    writer.add_token_types(SENTENCEPIECE_TYPES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    stored = ("blk.0.attn_qkv.weight",) if architecture == "phi3" else ()
    shapes = {spec.stored_name: spec.stored_shape for spec in gguf_tensors(config, architecture, stored)}
    for name, shape in shapes.items():
        if name == "blk.0.ffn_gate.weight" and gate_type != GGMLQuantizationType.F32:
            # Whole rows of quantized blocks, by the shape.
            writer.add_tensor(
                name, np.zeros(quant_shape_to_byte_shape(shape, gate_type), np.uint8), raw_dtype=gate_type
            )
        elif name != without_tensor:
            writer.add_tensor(name, np.zeros(shape, np.float32))
    if extra_tensor:
        writer.add_tensor(extra_tensor, np.zeros(4, np.float32))
    for name, numbers in (factors or {}).items():
        writer.add_tensor(name, np.array(numbers, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


TINY_HF_CONFIG: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": len(SENTENCEPIECE_TOKENS),
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_folder(
    folder: Path,
    changes: dict[str, object] | None = None,
    tokenizer: str = "{}",
    extra_tensors: Mapping[str, "np.ndarray"] | None = None,
) -> Path:
    """A complete Hugging Face folder with zeros for weights; ``changes`` override TINY_HF_CONFIG."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_HF_CONFIG | (changes or {})), encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    tensors = {name: np.zeros(shape, np.float32) for name, shape in decoder_tensors(tiny_config()).items()}
    save_file(tensors | dict(extra_tensors or {}), folder / "model.safetensors")
    return folder
