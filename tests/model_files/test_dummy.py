"""Folders without weights, described for random weights."""

from pathlib import Path

import pytest

from actorserve.errors import ModelError
from actorserve.model_files.describe import describe
from actorserve.model_files.locate import locate
from actorserve.model_files.tokenizer import load_tokenizer
from tests.model_files.builders import tiny_config, write_folder, write_gguf


def test_a_config_alone_is_a_dummy(tmp_path: Path) -> None:
    """Without weights and tokenizer, a folder is located and described, with every tensor of the decoder."""
    folder = write_folder(tmp_path / "tiny")
    whole = describe(folder)
    (folder / "model.safetensors").unlink()
    (folder / "tokenizer.json").unlink()
    assert locate(str(folder), load_format="dummy") == folder
    dummy = describe(folder, "dummy")
    assert (dummy.format, dummy.config, dummy.weight_files) == ("dummy", tiny_config(), ())
    assert dummy.tensors == whole.tensors
    with pytest.raises(ModelError, match="no safetensors"):
        describe(folder)


def test_a_dummy_does_not_look_at_weights(tmp_path: Path) -> None:
    """Weights in the folder, of whatever shape, are not read."""
    folder = write_folder(tmp_path, {"intermediate_size": 20})
    assert describe(folder, "dummy").config.intermediate_size == 20


def test_a_dummy_without_a_tokenizer_cannot_serve_text(tmp_path: Path) -> None:
    """A missing tokenizer is an error when the tokenizer is loaded."""
    folder = write_folder(tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json does not exist, and text cannot be served"):
        load_tokenizer(describe(folder, "dummy"))


def test_a_dummy_needs_a_folder(tmp_path: Path) -> None:
    """Load format dummy is an error for a GGUF file."""
    with pytest.raises(ModelError, match="load_format 'dummy' needs a folder"):
        describe(write_gguf(tmp_path / "a.gguf"), "dummy")
