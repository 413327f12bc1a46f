"""Reading the folders that transformers writes, for each family of models."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.numpy import load_file, save_file

from actorserve.errors import ModelError
from actorserve.model_files.describe import describe
from actorserve.model_files.description import DecoderConfig, ModelDescription, TensorSpec
from tests.model_files.builders import write_folder

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA = DecoderConfig(
    architecture="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-5,
    rope_theta=1e4,
    rotary_dim=8,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    windows=(0, 0),
    query_scale=8**-0.5,
)
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0],
    "original_max_position_embeddings": 32,
}
GEMMA3 = replace(
    LLAMA,
    architecture="gemma3",
    head_dim=16,
    rotary_dim=16,
    rope_theta=1e6,
    local_rope_theta=1e4,
    activation="gelu_tanh",
    tie_word_embeddings=True,
    windows=(16, 0),
    query_scale=24**-0.5,
    qk_norm=True,
    embedding_scale=32**0.5,
)
GEMMA3_SHAPE = SHAPE | {
    "head_dim": 16,
    "sliding_window": 16,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "full_attention"],
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "experts_per_token": 2}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}

FAMILIES: dict[str, tuple[transformers.PreTrainedConfig, DecoderConfig]] = {
    "llama": (transformers.LlamaConfig(**SHAPE), LLAMA),
    "llama with biases": (
        transformers.LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        replace(LLAMA, qkv_bias=True, attention_out_bias=True, mlp_bias=True, tie_word_embeddings=True),
    ),
    "mistral": (transformers.MistralConfig(**SHAPE, sliding_window=None), LLAMA),
    "mistral v0.1": (transformers.MistralConfig(**SHAPE, sliding_window=16), replace(LLAMA, windows=(16, 16))),
    "qwen2": (transformers.Qwen2Config(**SHAPE), replace(LLAMA, qkv_bias=True)),
    "qwen2 with windows": (
        transformers.Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=16, max_window_layers=1),
        replace(LLAMA, qkv_bias=True, windows=(0, 16)),
    ),
    "qwen3": (
        transformers.Qwen3Config(**SHAPE, head_dim=16),
        replace(LLAMA, architecture="qwen3", head_dim=16, rotary_dim=16, query_scale=0.25, qk_norm=True),
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig(
            **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True
        ),
        replace(
            LLAMA,
            architecture="qwen3_moe",
            qk_norm=True,
            **EXPERTS,
            expert_intermediate_size=24,
            normalize_expert_weights=True,
        ),
    ),
    "mixtral": (
        transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
        replace(
            LLAMA,
            architecture="mixtral",
            rope_theta=1e6,
            windows=(8, 8),
            **EXPERTS,
            expert_intermediate_size=48,
            normalize_expert_weights=True,
        ),
    ),
    "phi3": (transformers.Phi3Config(**SHAPE, sliding_window=16), replace(LLAMA, windows=(16, 16))),
    "phi4-mini": (
        transformers.Phi3Config(
            **SHAPE,
            original_max_position_embeddings=32,
            rope_parameters=LONGROPE | {"rope_theta": 1e4, "partial_rotary_factor": 0.75},
            tie_word_embeddings=True,
        ),
        replace(
            LLAMA,
            rotary_dim=6,
            rope_scaling={
                **LONGROPE,
                "short_factor": (1.0, 1.5, 2.0),
                "long_factor": (2.0, 3.0, 4.0),
                "attention_factor": 1.2**0.5,  # sqrt(1 + ln 2 / ln 32)
            },
            tie_word_embeddings=True,
        ),
    ),
    "gemma3": (transformers.Gemma3TextConfig(**GEMMA3_SHAPE), GEMMA3),
    "gemma3 with a vision tower": (
        transformers.Gemma3Config(
            text_config=GEMMA3_SHAPE,
            vision_config=VISION | {"image_size": 28, "patch_size": 14},
            mm_tokens_per_image=4,
        ),
        GEMMA3,
    ),
    "opt": (
        transformers.OPTConfig(
            vocab_size=64,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
        ),
        replace(
            LLAMA,
            architecture="opt",
            num_kv_heads=4,
            rotary_dim=0,
            activation="relu",
            qkv_bias=True,
            attention_out_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
        ),
    ),
}


def write_model(folder: Path, config: transformers.PreTrainedConfig) -> Path:
    """A random model of this config, as transformers writes it; the tokenizer is empty."""
    kinds: Any = transformers
    if config.model_type == "gemma3":
        model = kinds.Gemma3ForConditionalGeneration(config)
    else:
        model = kinds.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return folder


def change_config(folder: Path, **changes: object) -> None:
    """Set keys of a folder's config.json; None removes them."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8")) | changes
    raw = {key: value for key, value in raw.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")


def read(description: ModelDescription, name: str) -> "np.ndarray":
    """A tensor, assembled from float32 safetensors according to its TensorSpec."""
    spec: TensorSpec = next(spec for spec in description.tensors if spec.name == name)
    stored = load_file(description.weight_files[0])[spec.stored_name]
    part = stored if spec.expert is None else stored[spec.expert]
    part = part[spec.first_row : spec.first_row + spec.shape[0]]
    if spec.head_rows:
        heads = part.reshape(-1, len(spec.head_rows), *part.shape[1:])
        part = heads[:, list(spec.head_rows)].reshape(part.shape)
    return part + np.float32(spec.addend)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_is_described(tmp_path: Path, family: str) -> None:
    """A folder that save_pretrained wrote has the config's numbers, and every tensor of the decoder in its shape."""
    config, expected = FAMILIES[family]
    description = describe(write_model(tmp_path / "model", config))
    found = description.config
    if found.rope_scaling is not None and expected.rope_scaling is not None:
        factor = found.rope_scaling["attention_factor"]
        assert factor == pytest.approx(expected.rope_scaling["attention_factor"])
        found = replace(found, rope_scaling={**found.rope_scaling, "attention_factor": 1.2**0.5})
    assert found == expected
    stored = load_file(description.weight_files[0])
    for spec in description.tensors:
        assert stored[spec.stored_name].shape == spec.stored_shape
        assert read(description, spec.name).shape == spec.shape


def test_fused_tensors_are_told_apart(tmp_path: Path) -> None:
    """Phi-3's query, keys, values, gate and up follow each other in the fused tensors, without a gap."""
    description = describe(write_model(tmp_path / "model", FAMILIES["phi3"][0]))
    stored = load_file(description.weight_files[0])
    for names, whole in (
        (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.qkv_proj"),
        (("mlp.gate_proj", "mlp.up_proj"), "mlp.gate_up_proj"),
    ):
        parts = [read(description, f"model.layers.1.{name}.weight") for name in names]
        assert np.array_equal(np.concatenate(parts), stored[f"model.layers.1.{whole}.weight"])


def test_the_rotated_part_of_a_head_comes_first_in_each_half(tmp_path: Path) -> None:
    """If RoPE rotates 6 of 8 dimensions, rows 0-2 and 3-5 of each head become the beginnings of its halves."""
    description = describe(write_model(tmp_path / "model", FAMILIES["phi4-mini"][0]))
    stored = load_file(description.weight_files[0])["model.layers.0.self_attn.qkv_proj.weight"]
    keys = read(description, "model.layers.0.self_attn.k_proj.weight")
    assert np.array_equal(keys[8:16], stored[32 + 8 : 32 + 16][[0, 1, 2, 6, 3, 4, 5, 7]])
    values = read(description, "model.layers.0.self_attn.v_proj.weight")
    assert np.array_equal(values, stored[48:])


def test_gemmas_gains_are_counted_from_one(tmp_path: Path) -> None:
    """One is added to all of Gemma's norms, those of queries and keys too, and to no other tensor."""
    description = describe(write_model(tmp_path / "model", FAMILIES["gemma3"][0]))
    with_one = {spec.name for spec in description.tensors if spec.addend == 1.0}
    assert with_one == {spec.name for spec in description.tensors if len(spec.shape) == 1}
    assert {spec.addend for spec in description.tensors} == {0.0, 1.0}


def test_several_files_are_one_model(tmp_path: Path) -> None:
    """Sharded safetensors are read by their index, and the error for a missing one names it."""
    folder = write_model(tmp_path / "model", FAMILIES["qwen3_moe"][0])
    whole = describe(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    sharded = describe(folder)
    assert (sharded.config, sharded.tensors) == (whole.config, whole.tensors)
    assert len(sharded.weight_files) > 1
    sharded.weight_files[1].unlink()
    with pytest.raises(ModelError, match=f"{sharded.weight_files[1].name} does not exist"):
        describe(folder)


def test_gemma3_as_transformers_4_wrote_it(tmp_path: Path) -> None:
    """Older files have two RoPE bases, a scaling for full attention, and a pattern instead of the layers' kinds."""
    folder = write_model(tmp_path / "model", FAMILIES["gemma3"][0])
    scaling = {"rope_type": "linear", "factor": 8.0}
    change_config(
        folder,
        rope_parameters=None,
        layer_types=None,
        _sliding_window_pattern=None,
        sliding_window_pattern=2,
        rope_theta=5e5,
        rope_local_base_freq=2e4,
        rope_scaling=scaling,
    )
    expected = replace(GEMMA3, rope_theta=5e5, local_rope_theta=2e4, rope_scaling=scaling)
    assert describe(folder).config == expected


def test_absent_keys_of_a_published_gemma3_have_defaults(tmp_path: Path) -> None:
    """A text_config without heads, context and vocabulary gets the defaults of transformers' class."""
    folder = write_model(tmp_path / "model", FAMILIES["gemma3 with a vision tower"][0])
    text = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 7}
    change_config(
        folder, text_config=text | {"sliding_window": 1024, "rope_scaling": {"factor": 8.0, "type": "linear"}}
    )
    config = describe(folder, "dummy").config
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.max_position_embeddings) == (262208, 131072)
    assert config.windows == (1024, 1024, 1024, 1024, 1024, 0, 1024)
    assert (config.rope_theta, config.rope_scaling) == (1e6, {"rope_type": "linear", "factor": 8.0})


def test_gemma3s_text_decoder_is_found_under_both_names(tmp_path: Path) -> None:
    """In a model with a vision tower, the text decoder is found under both names that transformers has used."""
    folder = write_model(tmp_path / "model", FAMILIES["gemma3 with a vision tower"][0])
    tensors = {
        f"model.{name}".replace("model.language_model.model.", "model.language_model."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors")
    stored = {spec.name: spec.stored_name for spec in describe(folder).tensors}
    assert stored["model.norm.weight"] == "model.language_model.norm.weight"


def test_phi3s_older_name_of_longrope(tmp_path: Path) -> None:
    """rope_scaling of type ``su`` is longrope, and the trained context is a separate key of the config."""
    folder = write_model(tmp_path / "model", FAMILIES["phi3"][0])
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    change_config(
        folder,
        rope_parameters=None,
        rope_theta=1e4,
        rope_scaling={"type": "su", **factors},
        original_max_position_embeddings=16,
    )
    scaling = describe(folder).config.rope_scaling or {}
    assert (scaling["rope_type"], scaling["original_max_position_embeddings"]) == ("longrope", 16)
    assert (scaling["short_factor"], scaling["long_factor"]) == ((1.0,) * 4, (4.0,) * 4)
    assert scaling["attention_factor"] == pytest.approx(1.5**0.5)  # sqrt(1 + ln 4 / ln 16)


@pytest.mark.parametrize(
    ("family", "changes", "problem"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step 2 is not supported; supported: 1"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers \[1\] is not supported"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "9 experts per token are more than 4"),
        ("qwen3_moe", {"num_local_experts": 2**20}, "experts are more than"),
        ("qwen3_moe", {"num_local_experts": 5}, r"mlp\.gate\.weight has shape \(4, 32\)"),
        ("gemma3", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping 30\.0 is not supported"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported; supported: silu"),
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types must name 2 of full_attention, sliding_attention"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 2}, "layer_types must name 2"),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "yarn"}}},
            "sliding_attention's rope_type 'yarn' is not supported; supported: default",
        ),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before False is not supported; supported: True"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm True is not supported"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine False is not supported"),
        ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim 16 is not supported; supported: 32"),
        ("opt", {"activation_function": "gelu"}, "activation_function 'gelu' is not supported; supported: relu"),
        ("opt", {"num_attention_heads": 5}, "5 heads do not divide 32 dimensions evenly"),
        ("phi3", {"rope_parameters": LONGROPE}, "short_factor must be 4 positive numbers"),
        ("phi3", {"rope_parameters": LONGROPE | {"short_factor": [0.0] * 4}}, "short_factor must be 4 positive"),
        ("phi3", {"rope_parameters": LONGROPE | {"short_factor": [10**400] * 4}}, "short_factor must be a list"),
        ("phi3", {"partial_rotary_factor": 2.0, "rope_parameters": {}}, r"partial_rotary_factor 2\.0 is not supported"),
        ("llama", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config 'mxfp4' is not supported"),
        ("llama", {"quantization_config": {}}, "quantization_config 'unknown' is not supported"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, family: str, changes: dict[str, object], problem: str) -> None:
    """A config of an unsupported computation is refused in one line with the key and its value."""
    folder = write_model(tmp_path / "model", FAMILIES[family][0])
    change_config(folder, **changes)
    with pytest.raises(ModelError, match=problem) as caught:
        describe(folder)
    assert "\n" not in str(caught.value)


def test_an_extra_tensor_is_named(tmp_path: Path) -> None:
    """A tensor that the decoder does not use is refused, because the config may be of another model."""
    folder = write_folder(tmp_path, extra_tensors={"model.layers.0.self_attn.sinks": np.zeros(2, np.float32)})
    with pytest.raises(ModelError, match=r"model\.layers\.0\.self_attn\.sinks is not one of the model's"):
        describe(folder)


def test_what_transformers_ignores_is_ignored(tmp_path: Path) -> None:
    """The file may have rotary buffers of any type, and a head although the embeddings are tied."""
    folder = write_folder(
        tmp_path,
        {"tie_word_embeddings": True},
        extra_tensors={"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, np.int64)},
    )
    description = describe(folder)
    assert "lm_head.weight" not in {spec.name for spec in description.tensors}


def test_a_tensor_of_integers_is_named(tmp_path: Path) -> None:
    """Weights that are not floats, such as quantized ones, are refused by name and type."""
    folder = write_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight has type I8; supported: F64, F32, F16, BF16"):
        describe(folder)


JSON_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 3, 2**31, 10**400, 0.0, -0.5, 1e-300, 1e308, float("inf"), float("nan")]),
    st.sampled_from(["", "silu", "longrope", "sliding_attention", "dynamic"]),
    st.lists(st.sampled_from([1, 1.5, 0, "sliding_attention", None]), max_size=4),
    st.dictionaries(
        st.sampled_from(["rope_type", "factor", "short_factor", "full_attention"]),
        st.sampled_from(["yarn", "longrope", 2.0, [1.0] * 4, {}]),
    ),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(family=st.sampled_from(sorted(FAMILIES)), data=st.data())
def test_a_changed_config_never_escapes_as_another_exception(tmp_path: Path, family: str, data: st.DataObject) -> None:
    """A config with any values is described, or ModelError is raised."""
    raw = FAMILIES[family][0].to_dict()
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.sampled_from(sorted(raw)))] = data.draw(JSON_VALUES)
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    try:
        description = describe(tmp_path, "dummy")
    except ModelError:
        return
    assert len(description.config.windows) == description.config.num_layers
