"""Reading GGUF files, complete and damaged."""

import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from actorserve.errors import ModelError
from actorserve.model_files.describe import describe
from actorserve.model_files.description import ModelDescription
from actorserve.model_files.gguf_reader import read_gguf
from actorserve.model_files.tokenizer import load_tokenizer
from tests.model_files.builders import tiny_config, write_gguf


@pytest.mark.model
def test_the_default_models_header_gives_its_published_shape(default_description: ModelDescription) -> None:
    """The default model is described as its authors publish it."""
    config = default_description.config
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
    assert (config.rope_theta, config.rope_scaling, config.tie_word_embeddings) == (100000.0, None, True)
    assert default_description.name == "SmolLM2-135M-Instruct"
    assert default_description.eos_token_ids == (2,)
    assert default_description.special_tokens["eos_token"] == "<|im_end|>"
    assert "add_generation_prompt" in (default_description.chat_template or "")


def test_a_written_file_is_read_back(tmp_path: Path) -> None:
    """A file that the gguf package wrote is described with the same numbers."""
    description = describe(write_gguf(tmp_path / "tiny-Q4_K_M.gguf"))
    assert description.config == tiny_config(norm_eps=description.config.norm_eps)
    assert description.config.norm_eps == pytest.approx(1e-5)
    assert description.name == "tiny"
    assert (description.bos_token_id, description.eos_token_ids) == (1, (2, 7))


def test_a_tensors_bytes_lie_where_the_reader_says(tmp_path: Path) -> None:
    """A tensor's offset and length select exactly its values in the file."""
    path = write_gguf(tmp_path / "tiny.gguf", factors={"rope_freqs.weight": [1.0, 8.0]})
    tensor = read_gguf(path).tensors["rope_freqs.weight"]
    data = path.read_bytes()[tensor.offset : tensor.offset + tensor.num_bytes]
    assert struct.unpack("<2f", data) == (1.0, 8.0)


def scaling(rope_type: str, factor: float, original: int) -> dict[str, str | float | int]:
    prefix = "rope.scaling."
    return {f"{prefix}type": rope_type, f"{prefix}factor": factor, f"{prefix}original_context_length": original}


def test_rope_factors_and_scalings_are_described(tmp_path: Path) -> None:
    """Llama 3's written-out factors, linear and YaRN scaling all reach the config."""
    factors = describe(write_gguf(tmp_path / "a.gguf", factors={"rope_freqs.weight": [1.0, 8.0]})).config.rope_scaling
    linear = describe(write_gguf(tmp_path / "b.gguf", metadata=scaling("linear", 2.0, 32))).config.rope_scaling
    yarn = describe(write_gguf(tmp_path / "c.gguf", metadata=scaling("yarn", 4.0, 16))).config.rope_scaling
    assert factors == {"rope_type": "factors", "factors": (1.0, 8.0)}
    assert linear == {"rope_type": "linear", "factor": 2.0}
    assert yarn == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    """The error for an unknown architecture names it and the supported ones."""
    path = write_gguf(tmp_path / "other.gguf", architecture="mamba")
    with pytest.raises(ModelError, match=r"architecture 'mamba' is not supported; supported: llama"):
        describe(path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    """A file without one of its layers' tensors is refused by that tensor's name."""
    path = write_gguf(tmp_path / "tiny.gguf", without_tensor="blk.1.attn_k.weight")
    with pytest.raises(ModelError, match=r"blk\.1\.attn_k\.weight is missing"):
        describe(path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not a GGUF file"),
        (b"hello, this is certainly not a model", "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 99, 0, 0) + b"\0" * 8, "version 99 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + b"\0" * 8, "big-endian is not supported"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0) + b"\0" * 8, "damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60) + b"\0" * 8, "damaged"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), "damaged"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 0, 2**40), "damaged"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 9, 1), "damaged"),
    ],
)
def test_garbage_is_one_line(tmp_path: Path, content: bytes, problem: str) -> None:
    """A file that is not GGUF, or claims absurd sizes, is refused in one line and at once."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=problem) as caught:
        describe(path)
    assert "\n" not in str(caught.value)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    """A file that is cut anywhere is refused with ModelError, and with no other exception."""
    whole = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, len(whole) - 64, 97), *range(len(whole) - 64, len(whole) - 32)]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"truncated|not a GGUF file"):
            describe(cut)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_byte_never_escapes_as_another_exception(tmp_path: Path, data: st.DataObject) -> None:
    """After any change of header bytes, the model is described and its tokenizer built, or ModelError is raised."""
    path = tmp_path / "tiny.gguf"
    whole = bytearray((path if path.exists() else write_gguf(path)).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, min(len(whole), 12_000) - 1))] = data.draw(st.integers(0, 255))
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(whole)
    try:
        description = describe(changed)
        load_tokenizer(description).encode("hello")
    except ModelError:
        return
    assert description.config.num_layers == 2
