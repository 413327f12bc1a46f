"""Small random models of every architecture: transformers' own as the reference, their folder, and their GGUF file."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
import transformers
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

Settings = dict[str, Any]

VOCAB_SIZE = 211
WINDOW = 20
_LLAMA: Settings = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
_HEADS: Settings = {"head_dim": 32}
_PHI3: Settings = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_EXPERTS: Settings = {"num_experts_per_tok": 2}
_QWEN3_EXPERTS: Settings = _EXPERTS | {"num_experts": 6, "moe_intermediate_size": 32}
_GEMMA3: Settings = {
    **_LLAMA,
    **_HEADS,
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_LONG_FACTORS = [1.0 + n / 2 for n in range(8)]

ARCHITECTURES: dict[str, tuple[str, Settings]] = {
    "llama": ("LlamaConfig", _LLAMA | _HEADS),
    "mistral": ("MistralConfig", _LLAMA | _HEADS | {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2Config", _LLAMA | {"tie_word_embeddings": True}),
    "phi3": ("Phi3Config", _LLAMA | _PHI3 | {"sliding_window": WINDOW}),
    "phi3 longrope": (
        "Phi3Config",
        _LLAMA
        | _PHI3
        | {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "factor": 8.0,
                "short_factor": [1.0] * 8,
                "long_factor": _LONG_FACTORS,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "phi4": (
        "Phi3Config",
        _LLAMA
        | _PHI3
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    "qwen3": ("Qwen3Config", _LLAMA | _HEADS),
    "qwen3 experts": ("Qwen3MoeConfig", _LLAMA | _HEADS | _QWEN3_EXPERTS | {"norm_topk_prob": True}),
    "qwen3 experts, raw shares": ("Qwen3MoeConfig", _LLAMA | _HEADS | _QWEN3_EXPERTS | {"norm_topk_prob": False}),
    "mixtral": ("MixtralConfig", _LLAMA | _HEADS | _EXPERTS | {"num_local_experts": 5}),
    "gemma3": ("Gemma3TextConfig", _GEMMA3 | {"query_pre_attn_scalar": 32}),
    "gemma3, scale of its own": ("Gemma3TextConfig", _GEMMA3 | {"query_pre_attn_scalar": 20}),
    "opt": (
        "OPTConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "word_embed_proj_dim": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
            "init_std": 0.2,
        },
    ),
}
GGUF_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "phi3": "phi3",
    "gemma3_text": "gemma3",
}
"""By transformers' ``model_type``."""
LONG_ROPE_FACTORS = {"rope_factors_short.weight": [1.0] * 8, "rope_factors_long.weight": _LONG_FACTORS}


@dataclass(frozen=True)
class SmallModel:
    reference: Any
    folder: Path


def save_model(
    folder: Path, architecture: str, rounded_to: GGMLQuantizationType | None = None, **changes: Any
) -> SmallModel:
    """A random model, saved in ``folder``. ``rounded_to``: its matrices hold numbers that this type can represent."""
    class_name, settings = ARCHITECTURES[architecture]
    torch.manual_seed(0)
    config = getattr(transformers, class_name)(**(settings | changes))
    make_reference: Any = transformers.AutoModelForCausalLM.from_config
    reference = make_reference(config).float().eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() == 1:  # norms and biases, which would be ones and zeros
                torch.nn.init.normal_(parameter, mean=0.5)
            elif rounded_to is not None:
                rounded = dequantize(quantize(parameter.numpy(), rounded_to), rounded_to)
                parameter.copy_(torch.from_numpy(rounded.reshape(parameter.shape)))
    reference.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return SmallModel(reference, folder)


def write_gguf(
    folder: Path, path: Path, kind: GGMLQuantizationType = GGMLQuantizationType.F32, factors: Settings | None = None
) -> Path:
    """A GGUF file as llama.cpp's converter makes it from a folder, with matrices in ``kind`` and a made-up vocabulary.

    ``factors``: further tensors of one dimension.
    """
    settings = json.loads((folder / "config.json").read_text())
    architecture = GGUF_ARCHITECTURES[settings["model_type"]]
    heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(path), architecture)
    _write_metadata(writer, settings, settings.get("head_dim") or settings["hidden_size"] // heads)
    if architecture == "gemma3":
        writer.add_sliding_window_pattern(2)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, settings["num_hidden_layers"])
    for name, tensor in _stacked(load_file(folder / "model.safetensors")):
        array = tensor.numpy()
        if architecture == "llama" and re.search(r"\.(q|k)_proj\.", name):
            array = _neighbouring_pairs(array, heads if ".q_proj." in name else kv_heads)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            array = array + 1
        stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored_name is not None, name
        stored_as = kind if array.ndim > 1 and not stored_name.endswith("gate_inp.weight") else GGMLQuantizationType.F32
        writer.add_tensor(stored_name, quantize(np.ascontiguousarray(array), stored_as), raw_dtype=stored_as)
    for name, numbers in (factors or {}).items():
        writer.add_tensor(name, np.array(numbers, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_metadata(writer: Any, settings: Settings, head_dim: int) -> None:
    rope = settings["rope_parameters"]
    writer.add_context_length(settings["max_position_embeddings"])
    writer.add_embedding_length(settings["hidden_size"])
    writer.add_block_count(settings["num_hidden_layers"])
    writer.add_feed_forward_length(settings["intermediate_size"])
    writer.add_head_count(settings["num_attention_heads"])
    writer.add_head_count_kv(settings["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    full = rope.get("full_attention", rope)
    writer.add_rope_dimension_count(int(head_dim * full.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(full["rope_theta"])
    if full["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        trained = full["original_max_position_embeddings"]
        stretch = settings["max_position_embeddings"] / trained
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(stretch) / np.log(trained))))
    writer.add_layer_norm_rms_eps(settings["rms_norm_eps"])
    if settings.get("sliding_window"):
        writer.add_sliding_window(settings["sliding_window"])
    experts = settings.get("num_local_experts") or settings.get("num_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(settings["num_experts_per_tok"])
        if "moe_intermediate_size" in settings:
            writer.add_expert_feed_forward_length(settings["moe_intermediate_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{n}" for n in range(VOCAB_SIZE)])
    writer.add_token_types([1] * VOCAB_SIZE)
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(0)


def _stacked(tensors: Mapping[str, torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
    """The tensors, with all experts of a layer stacked into one."""
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        expert = re.fullmatch(r"(.*\.experts\.)(\d+)\.(.*)", name)
        if expert is None:
            yield name, tensor
        else:
            merged = expert[1].replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward") + expert[3]
            stacks.setdefault(merged if "block_sparse_moe" in name else expert[1] + expert[3], {})[int(expert[2])] = (
                tensor
            )
    for name, stack in stacks.items():
        yield name, torch.stack([stack[number] for number in sorted(stack)])


def _neighbouring_pairs(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """A head's rows in GGUF's order, in which the two rows that RoPE rotates together are neighbours."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
