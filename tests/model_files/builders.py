"""Small model files for tests: a GGUF writer (the gguf package's) and a Hugging Face folder."""

import json
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from safetensors.numpy import save_file

from actorserve.model_files.description import DecoderConfig
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
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }
    return DecoderConfig(**(values | changes))  # type: ignore[arg-type]


def write_gguf(
    path: Path,
    config: DecoderConfig | None = None,
    *,
    architecture: str = "llama",
    rope_factors: list[float] | None = None,
    rope_scaling: tuple[str, float, int] | None = None,
    eot_token_id: int | None = None,
    without_tensor: str = "",
) -> Path:
    """A whole GGUF file with a SentencePiece vocabulary; weights are zeros."""
    config = config or tiny_config()
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if rope_scaling is not None:
        writer.add_string(f"{architecture}.rope.scaling.type", rope_scaling[0])
        writer.add_float32(f"{architecture}.rope.scaling.factor", rope_scaling[1])
        writer.add_uint32(f"{architecture}.rope.scaling.original_context_length", rope_scaling[2])
    writer.add_tokenizer_model("llama")
    writer.add_token_list(SENTENCEPIECE_TOKENS)
    writer.add_token_scores([float(len(token)) for token in SENTENCEPIECE_TOKENS])
    writer.add_token_types(SENTENCEPIECE_TYPES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if eot_token_id is not None:
        writer.add_eot_token_id(eot_token_id)
    for spec in decoder_tensors(config):
        if spec.gguf_name != without_tensor:
            writer.add_tensor(spec.gguf_name, np.zeros(spec.shape, np.float32))
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
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


def write_folder(folder: Path, changes: dict[str, object] | None = None, tokenizer: str = "{}") -> Path:
    """A whole Hugging Face folder with zeros for weights; ``changes`` go over TINY_HF_CONFIG."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_HF_CONFIG | (changes or {})), encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    tensors = {spec.hf_name: np.zeros(spec.shape, np.float32) for spec in decoder_tensors(tiny_config())}
    save_file(tensors, folder / "model.safetensors")
    return folder
