"""Reading Hugging Face folders."""

import json
from pathlib import Path

import pytest

from actorserve.errors import ModelError
from actorserve.model_files.describe import describe
from tests.model_files.builders import tiny_config, write_folder


def test_a_folder_is_described(tmp_path: Path) -> None:
    """config.json, generation_config.json and tokenizer_config.json are combined in one description."""
    folder = write_folder(tmp_path / "tiny")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 2]}', encoding="utf-8")
    tokenizer = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    description = describe(folder)
    assert description.config == tiny_config()
    assert (description.name, description.format) == ("tiny", "hf")
    assert description.weight_files == (folder / "model.safetensors",)
    assert (description.bos_token_id, description.eos_token_ids) == (1, (7, 2))
    assert description.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert description.chat_template == "{{ messages }}"


def test_a_template_file_goes_before_the_configs(tmp_path: Path) -> None:
    """chat_template.jinja takes precedence over tokenizer_config.json."""
    folder = write_folder(tmp_path / "tiny")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "old"}', encoding="utf-8")
    (folder / "chat_template.jinja").write_text("new", encoding="utf-8")
    assert describe(folder).chat_template == "new"


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_scaling": None, "rope_theta": 5e5}, 5e5, None),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 3e5}}, 3e5, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 1e4, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 1e4, {"rope_type": "llama3", **LLAMA3}),
        (
            {"rope_theta": None, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            5e5,
            {"rope_type": "llama3", **LLAMA3},
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4}},
            1e4,
            {"rope_type": "dynamic", "factor": 4, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_both_forms_of_rope_are_read(
    tmp_path: Path, changes: dict[str, object], theta: float, scaling: dict[str, object] | None
) -> None:
    """rope_theta with rope_scaling, and the newer rope_parameters, mean the same."""
    config = describe(write_folder(tmp_path, changes)).config
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


def test_mistral_without_a_window_is_a_llama(tmp_path: Path) -> None:
    """Mistral's decoder is Llama's if its window is not shorter than the context."""
    changes: dict[str, object] = {"model_type": "mistral", "sliding_window": None}
    assert describe(write_folder(tmp_path, changes)).config.architecture == "llama"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model_type": "gpt_neox"}, "architecture 'gpt_neox' is not supported; supported: llama"),
        ({"model_type": "llama4"}, "architecture 'llama4' is not supported; supported: llama, mistral, qwen2"),
        ({"model_type": None}, "model_type is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": -8}, "hidden_size must be from 1"),
        ({"hidden_size": "8"}, "hidden_size must be an integer"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be from 1 to 4096"),
        ({"max_position_embeddings": 2**31 - 1}, "positions are more than"),
        ({"vocab_size": 2**21}, "tokens in the vocabulary are more than"),
        ({"num_hidden_layers": 3}, r"model\.layers\.2\.\S+ is missing"),
        ({"intermediate_size": 16}, "has shape"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "divide"),
        ({"rope_scaling": {"rope_type": "mystery", "factor": 2.0}}, "'mystery' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 1e308}}, "factor above"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"}}, "beta_fast must be a number"),
        ({"partial_rotary_factor": 0.5}, "part of each head"),
        ({"rope_scaling": 7}, "rope_scaling must be an object"),
        ({"rope_theta": float("nan")}, "rope_theta must be finite"),
        ({"eos_token_id": 10**6}, "eos_token_id is not a token"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            "quantization_config 'hqq' is not supported; supported: awq",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
    ],
)
def test_a_wrong_config_is_one_line(tmp_path: Path, changes: dict[str, object], problem: str) -> None:
    """Each wrong value is refused by its name."""
    with pytest.raises(ModelError, match=problem) as caught:
        describe(write_folder(tmp_path, changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "[1, 2]", "{", "[" * 100_000])
def test_a_damaged_config_is_one_line(tmp_path: Path, content: str) -> None:
    """A config.json that is not a JSON object is refused."""
    folder = write_folder(tmp_path)
    (folder / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json: not"):
        describe(folder)


def test_truncated_safetensors_are_refused(tmp_path: Path) -> None:
    """A safetensors file that ends early is refused before any weight is read."""
    folder = write_folder(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(ModelError, match="not a complete safetensors file"):
        describe(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "weights.bin"])
def test_an_index_cannot_name_files_elsewhere(tmp_path: Path, name: str) -> None:
    """The index of a sharded model may name only safetensors files in its folder."""
    folder = write_folder(tmp_path / "tiny")
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ModelError, match="names a file outside the folder"):
        describe(folder)
