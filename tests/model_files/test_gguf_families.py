"""Reading GGUF files of each architecture that llama.cpp names."""

from dataclasses import replace
from pathlib import Path

import pytest
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES, GGMLQuantizationType

from actorserve.errors import ModelError
from actorserve.model_files.describe import describe
from actorserve.model_files.description import DecoderConfig, ModelDescription
from tests.model_files.builders import tiny_config, write_gguf

Metadata = dict[str, int | float | str]

EXPERT_KEYS: Metadata = {"expert_count": 4, "expert_used_count": 2}
QWEN3 = tiny_config(architecture="qwen3", qk_norm=True)
WITH_EXPERTS = replace(
    tiny_config(), num_experts=4, experts_per_token=2, expert_intermediate_size=12, normalize_expert_weights=True
)
GEMMA3 = tiny_config(
    architecture="gemma3",
    num_layers=7,
    windows=(16, 16, 16, 16, 16, 0, 16),
    rope_theta=1e6,
    local_rope_theta=1e4,
    activation="gelu_tanh",
    qk_norm=True,
    embedding_scale=8**0.5,
    tie_word_embeddings=True,
)
FACTORS = {"rope_factors_short.weight": [1.0], "rope_factors_long.weight": [4.0]}
PHI4_MINI = tiny_config(
    rotary_dim=2,
    windows=(8, 8),
    rope_scaling={
        "rope_type": "longrope",
        "short_factor": (1.0,),
        "long_factor": (4.0,),
        "original_max_position_embeddings": 16,
        "attention_factor": 1.5,
    },
)

FAMILIES: dict[str, tuple[str, DecoderConfig, Metadata]] = {
    "llama": ("llama", tiny_config(), {}),
    "mistral v0.1": ("llama", tiny_config(windows=(16, 16)), {"attention.sliding_window": 16}),
    "mixtral": ("llama", replace(WITH_EXPERTS, architecture="mixtral"), EXPERT_KEYS),
    "qwen2": ("qwen2", tiny_config(qkv_bias=True, tie_word_embeddings=True), {}),
    "qwen3": ("qwen3", QWEN3, {}),
    "qwen3moe": (
        "qwen3moe",
        replace(WITH_EXPERTS, architecture="qwen3_moe", qk_norm=True, expert_intermediate_size=6),
        EXPERT_KEYS | {"expert_feed_forward_length": 6},
    ),
    "phi3": ("phi3", tiny_config(), {}),
    "phi4-mini": (
        "phi3",
        PHI4_MINI,
        {
            "attention.sliding_window": 8,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.attn_factor": 1.5,
        },
    ),
    "gemma3": ("gemma3", GEMMA3, {"attention.sliding_window": 16}),
    "gemma3 with a pattern": (
        "gemma3",
        replace(GEMMA3, windows=(16, 0, 16, 0, 16, 0, 16), local_rope_theta=2e4),
        {"attention.sliding_window": 16, "attention.sliding_window_pattern": 2, "rope.freq_base_swa": 2e4},
    ),
    "gemma3 27B": (
        "gemma3",
        replace(GEMMA3, num_layers=62, num_heads=4, windows=(0,) * 62, query_scale=2**-0.5),
        {},
    ),
}


def written(folder: Path, family: str) -> ModelDescription:
    architecture, config, metadata = FAMILIES[family]
    factors = FACTORS if family == "phi4-mini" else None
    return describe(
        write_gguf(folder / "a.gguf", config, architecture=architecture, metadata=metadata, factors=factors)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_each_architecture_is_described(tmp_path: Path, family: str) -> None:
    """Metadata with llama.cpp's names gives the config from which it was written."""
    description = written(tmp_path, family)
    assert replace(description.config, norm_eps=1e-5) == FAMILIES[family][1]
    assert description.config.norm_eps == pytest.approx(1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_llama_cpps(tmp_path: Path, family: str) -> None:
    """Every tensor's name is one that the gguf package lists for the architecture."""
    by_name = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    listed = {TENSOR_NAMES[tensor] for tensor in MODEL_TENSORS[MODEL_ARCH(by_name[FAMILIES[family][0]])]}
    description = written(tmp_path, family)
    for spec in description.tensors:
        parts = spec.stored_name.split(".")
        number = parts[1] if parts[0] == "blk" else ""
        assert spec.stored_name.rpartition(".")[0] in {name.format(bid=number) for name in listed}


def test_experts_are_slices_of_stacked_tensors(tmp_path: Path) -> None:
    """Each expert's weight is a slice, by its number, of a tensor that stacks all experts."""
    specs = {spec.name: spec for spec in written(tmp_path, "qwen3moe").tensors}
    down = specs["model.layers.1.mlp.experts.3.down_proj.weight"]
    assert (down.stored_name, down.stored_shape, down.expert) == ("blk.1.ffn_down_exps.weight", (4, 8, 6), 3)
    assert down.shape == (8, 6)


@pytest.mark.parametrize(
    ("family", "rows"),
    [("llama", (0, 2, 1, 3)), ("mixtral", (0, 2, 1, 3)), ("qwen2", ()), ("phi3", ()), ("phi4-mini", (0, 2, 1, 3))],
)
def test_only_query_and_keys_are_reordered(tmp_path: Path, family: str, rows: tuple[int, ...]) -> None:
    """Files of architecture llama have a head's pairs side by side; others reorder rows only for partial RoPE."""
    for spec in written(tmp_path, family).tensors:
        assert spec.head_rows == (rows if "q_proj" in spec.name or "k_proj" in spec.name else ())


def test_phi3s_fused_tensors_are_told_apart(tmp_path: Path) -> None:
    """Query, keys and values are rows of attn_qkv; gate and up are rows of ffn_up."""
    description = written(tmp_path, "phi3")
    places = {
        spec.name.removeprefix("model.layers.0."): (spec.stored_name, spec.first_row, spec.stored_shape)
        for spec in description.tensors
    }
    assert places["self_attn.q_proj.weight"] == ("blk.0.attn_qkv.weight", 0, (16, 8))
    assert places["self_attn.k_proj.weight"] == ("blk.0.attn_qkv.weight", 8, (16, 8))
    assert places["self_attn.v_proj.weight"] == ("blk.0.attn_qkv.weight", 12, (16, 8))
    assert places["mlp.gate_proj.weight"] == ("blk.0.ffn_up.weight", 0, (24, 8))
    assert places["mlp.up_proj.weight"] == ("blk.0.ffn_up.weight", 12, (24, 8))


@pytest.mark.parametrize(
    ("architecture", "metadata", "problem"),
    [
        ("opt", {}, "llama.cpp has no architecture 'opt'"),
        ("gemma2", {}, "architecture 'gemma2' is not supported; supported: llama, qwen2, phi3, qwen3"),
        ("llama", {"block_count": 2**30}, "llama.block_count must be from 1 to 4096"),
        ("llama", {"attention.value_length": 8}, "attention.value_length 8 is not supported; supported: 4"),
        ("llama", {"rope.dimension_count": 2}, "rope.dimension_count 2 is not supported; supported: 4"),
        ("llama", {"rope.scaling.type": "mystery"}, "RoPE scaling 'mystery' is not supported; supported: linear"),
        ("llama", {"rope.scaling.type": "longrope"}, "rope_factors_short.weight is missing"),
        ("llama", {"expert_count": 4, "expert_used_count": 5}, "5 experts per token are more than 4"),
        ("gemma3", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping 30\.0 is not supported"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, architecture: str, metadata: Metadata, problem: str) -> None:
    """Metadata of an unsupported computation is refused in one line with the key and its value."""
    path = write_gguf(tmp_path / "a.gguf", architecture=architecture, metadata=metadata)
    with pytest.raises(ModelError, match=problem) as caught:
        describe(path)
    assert "\n" not in str(caught.value)


def test_one_set_of_factors_alone_is_refused(tmp_path: Path) -> None:
    """LongRoPE has factors for short and for long contexts."""
    path = write_gguf(tmp_path / "a.gguf", factors={"rope_factors_long.weight": [1.0, 2.0]})
    with pytest.raises(ModelError, match=r"rope_factors_short\.weight is missing"):
        describe(path)


def test_an_extra_tensor_is_named(tmp_path: Path) -> None:
    """A tensor that the decoder does not use is refused, because the file may be of another model."""
    path = write_gguf(tmp_path / "a.gguf", extra_tensor="blk.0.attn_sinks.weight")
    with pytest.raises(ModelError, match=r"blk\.0\.attn_sinks\.weight is not one of the model's"):
        describe(path)


def test_rotary_factors_of_older_files_are_ignored(tmp_path: Path) -> None:
    """RoPE tensors that older converters wrote for each layer are ignored."""
    describe(write_gguf(tmp_path / "a.gguf", extra_tensor="blk.0.attn_rot_embd.weight"))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_usual_quantizations_are_described(tmp_path: Path, kind: str) -> None:
    """The common number formats are accepted."""
    config = tiny_config(hidden_size=256)
    path = write_gguf(tmp_path / "a.gguf", config, gate_type=GGMLQuantizationType[kind])
    assert describe(path).config.hidden_size == 256


@pytest.mark.parametrize("kind", ["Q2_K", "IQ4_XS", "MXFP4"])
def test_another_quantization_is_named(tmp_path: Path, kind: str) -> None:
    """A tensor of an unsupported number format is refused by its name and type."""
    config = tiny_config(hidden_size=256)
    path = write_gguf(tmp_path / "a.gguf", config, gate_type=GGMLQuantizationType[kind])
    with pytest.raises(ModelError, match=rf"blk\.0\.ffn_gate\.weight has type {kind}; supported: F32"):
        describe(path)


def test_a_part_of_a_split_file_says_so(tmp_path: Path) -> None:
    """A file that is one of several parts is refused, and the error says what to do."""
    path = write_gguf(tmp_path / "a-00001-of-00002.gguf", num_parts=2)
    with pytest.raises(ModelError, match="one of several parts; merge them"):
        describe(path)
