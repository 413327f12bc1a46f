"""Weights are read from every format to the same numbers, and what cannot be read is one line that says so."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from actorserve.core.messages import StepPlan
from actorserve.errors import ModelError
from actorserve.model_files.describe import describe
from actorserve.model_files.tensors import decoder_tensors
from workers.torch_engine import TorchEngine
from workers.weights import load_llama, weights_digest

PLAN = StepPlan(0, ("a",), (0,), (tuple(range(40, 140)),), (tuple(range(7)),), (True,))
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1e4,
}


def logits_of(path: Path) -> torch.Tensor:
    return TorchEngine(describe(path), kv_cache_bytes=2**20).logits(PLAN)


def load(path: Path, folder: Path | None = None) -> None:
    """Load what lies at ``path``, as the description of ``folder`` says."""
    load_llama(describe(folder or path), 64, torch.float32, torch.device("cpu"), lambda _: None)


def pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """A head's rows in a GGUF file's order: those that are turned together are neighbours."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(model: Any, path: Path, rope_factors: list[float] | None = None) -> None:
    """Write transformers' model as a GGUF file, with an invented vocabulary."""
    settings, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(settings.max_position_embeddings)
    writer.add_embedding_length(settings.hidden_size)
    writer.add_block_count(settings.num_hidden_layers)
    writer.add_feed_forward_length(settings.intermediate_size)
    writer.add_head_count(settings.num_attention_heads)
    writer.add_head_count_kv(settings.num_key_value_heads)
    writer.add_key_length(settings.head_dim)
    writer.add_value_length(settings.head_dim)
    writer.add_rope_dimension_count(settings.head_dim)
    writer.add_rope_freq_base(settings.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(settings.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{n}" for n in range(settings.vocab_size)])
    writer.add_token_types([1] * settings.vocab_size)
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(0)
    heads = {"q_proj": settings.num_attention_heads, "k_proj": settings.num_key_value_heads}
    names = {spec.hf_name: spec.gguf_name for spec in decoder_tensors(describe_config(model))}
    for name, gguf_name in names.items():
        array = state[name].numpy()
        for projection, num_heads in heads.items():
            if f".{projection}." in name:
                array = pairs(array, num_heads)
        writer.add_tensor(gguf_name, np.ascontiguousarray(array))
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe_config(model: Any) -> Any:
    return describe(Path(model.config._name_or_path)).config


@pytest.fixture
def small(make_model: Any) -> Any:
    made = make_model(attention_bias=True, mlp_bias=True)
    made.reference.config._name_or_path = str(made.folder)
    return made


def test_sharded_files_are_one_model(make_model: Any) -> None:
    """A folder with an index and several safetensors files is read to the same bits as a single file."""
    shards = make_model(max_shard_size="40KB")
    assert len(list(shards.folder.glob("*.safetensors"))) > 1
    assert torch.equal(logits_of(shards.folder), logits_of(make_model().folder))


def test_gguf_and_folder_are_one_model(small: Any, tmp_path: Path) -> None:
    """The same weights give the same bits from a GGUF file, whose heads are ordered otherwise, and from a folder."""
    write_gguf(small.reference, tmp_path / "small.gguf")
    assert torch.equal(logits_of(tmp_path / "small.gguf"), logits_of(small.folder))


def test_gguf_rope_factors_are_llama3s_scaling(make_model: Any, tmp_path: Path) -> None:
    """A GGUF file's RoPE factors give what the folder's llama3 scaling gives, up to rounding."""
    model = make_model(head_dim=32, rope_parameters=LLAMA3)
    model.reference.config._name_or_path = str(model.folder)
    scaled = model.reference.model.rotary_emb.inv_freq
    plain = 1.0 / 1e4 ** (torch.arange(0, 32, 2) / 32)
    write_gguf(model.reference, tmp_path / "small.gguf", (plain / scaled).tolist())
    assert (logits_of(tmp_path / "small.gguf") - logits_of(model.folder)).abs().max() < 1e-4


def test_quantized_tensors_are_dequantized(small: Any, tmp_path: Path) -> None:
    """A Q8_0 tensor is read as the gguf package dequantizes it."""
    from gguf.quants import dequantize, quantize

    from workers.weights import GgufSource

    weight = torch.randn(64, 96).numpy()
    path = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    packed = quantize(weight, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("token_embd.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GgufSource(path, describe(small.folder).config).read("model.embed_tokens.weight")
    assert torch.equal(found, torch.from_numpy(dequantize(packed, gguf.GGMLQuantizationType.Q8_0)))
    assert (found - torch.from_numpy(weight)).abs().max() < 0.05


@pytest.mark.parametrize("share", [0.01, 0.5, 0.999])
def test_a_truncated_gguf_file_is_refused(small: Any, tmp_path: Path, share: float) -> None:
    """A GGUF file that ends early is one line with its name, wherever it ends."""
    path = tmp_path / "small.gguf"
    write_gguf(small.reference, path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelError, match=r"small\.gguf") as caught:
        load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_safetensors_file_is_refused(small: Any, share: float) -> None:
    """A safetensors file that ends early is one line with its name, also where it was whole when described."""
    description = describe(small.folder)
    file = small.folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelError, match=r"model\.safetensors") as caught:
        load(small.folder)
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_llama(description, 64, torch.float32, torch.device("cpu"), lambda _: None)


@pytest.mark.parametrize("late", [False, True])
def test_missing_and_misshapen_tensors_are_named(small: Any, late: bool) -> None:
    """A missing tensor, or one of another shape or type, is named, be it found when described or when loaded."""
    description = describe(small.folder)
    file = small.folder / "model.safetensors"
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(file)
    weight = tensors.pop(name)
    for bad in ({}, {name: weight[:, :-1].contiguous()}):
        save_file(tensors | bad, file, metadata={"format": "pt"})
        with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down_proj"):
            load_llama(
                description if late else describe(small.folder), 64, torch.float32, torch.device("cpu"), lambda _: None
            )
    save_file(tensors | {name: weight.to(torch.int32)}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down_proj"):
        load(small.folder)


def test_an_unknown_architecture_is_refused(small: Any) -> None:
    """A model of another family is one line that names the family."""
    settings = small.folder / "config.json"
    raw = json.loads(settings.read_text()) | {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    settings.write_text(json.dumps(raw))
    with pytest.raises(ModelError, match="mamba"):
        load(small.folder)


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({"rope_theta": 1.0}, {"rope_type": "yarn"}),
        ({}, {"rope_type": "yarn", "beta_fast": -1.0}),
        ({}, {"rope_type": "yarn", "attention_factor": float("inf")}),
        ({"head_dim": 2}, {"rope_type": "dynamic"}),
    ],
)
def test_rope_that_cannot_be_computed_is_refused(
    small: Any, changes: dict[str, Any], scaling: dict[str, object]
) -> None:
    """Scaling whose numbers divide by zero, or ask for a logarithm of less than nothing, is one line."""
    description = describe(small.folder)
    scaling = {"factor": 2.0, "original_max_position_embeddings": 64} | scaling
    broken = replace(description.config, rope_scaling=scaling, **changes)
    with pytest.raises(ModelError, match="RoPE cannot be computed") as caught:
        load_llama(replace(description, config=broken), 64, torch.float32, torch.device("cpu"), lambda _: None)
    assert "\n" not in str(caught.value)


def test_pickles_are_never_read(small: Any, tmp_path: Path) -> None:
    """A folder whose weights are pickles alone is refused; nothing in them is opened."""
    for name in ("pytorch_model.bin", "model.pt"):
        shutil.copytree(small.folder, tmp_path / name)
        (tmp_path / name / "model.safetensors").rename(tmp_path / name / name)
        with pytest.raises(ModelError, match="safetensors"):
            load(tmp_path / name)


def test_progress_is_told(small: Any) -> None:
    """Loading tells its progress, growing, up to the end."""
    told: list[float] = []
    TorchEngine(describe(small.folder), kv_cache_bytes=2**20, progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert len(told) > 2


def test_the_digest_follows_every_byte(small: Any) -> None:
    """One changed byte in a weight file is another digest."""
    description = describe(small.folder)
    before = weights_digest(description)
    assert weights_digest(description) == before
    file = small.folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert weights_digest(description) != before
