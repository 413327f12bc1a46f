"""Rotary tables against transformers' own."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from actorserve.model_files.describe import describe
from actorserve.model_files.description import DecoderConfig
from workers.models.rope import RotaryTable, angles_follow_context, local_rotary

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0],
    "original_max_position_embeddings": 32,
}


def described(config: transformers.PreTrainedConfig, folder: Path) -> DecoderConfig:
    """Our config, from the file that transformers writes."""
    config.save_pretrained(folder)
    return describe(folder, "dummy").config


def theirs(module: Any, num_positions: int, *layer_type: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions in our shape: theirs hold each number twice, for both halves of a head."""
    cos, sin = module(torch.zeros(1), torch.arange(num_positions)[None], *layer_type)
    half = cos.shape[-1] // 2
    return cos[0, :, None, :half], sin[0, :, None, :half]


@pytest.mark.parametrize("num_positions", [32, 64])
def test_longrope_takes_the_factors_of_the_served_context(tmp_path: Path, num_positions: int) -> None:
    """Every position has the short factors if the served context is within the trained one, else the long ones."""
    config = transformers.Phi3Config(**SHAPE, rope_parameters=LONGROPE, original_max_position_embeddings=32)
    expected = theirs(Phi3RotaryEmbedding(config), num_positions)
    cos, sin = RotaryTable(described(config, tmp_path), num_positions, CPU)(torch.arange(num_positions))
    torch.testing.assert_close(cos[..., :3], expected[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(sin[..., :3], expected[1], atol=1e-5, rtol=0)
    assert torch.equal(cos[..., 3:], torch.ones(num_positions, 1, 1))
    assert torch.equal(sin[..., 3:], torch.zeros(num_positions, 1, 1))


def test_a_long_table_is_made_in_pieces(tmp_path: Path) -> None:
    """Making the table takes only a few megabytes more than the table, and its pieces fit together exactly."""
    config = described(transformers.LlamaConfig(**SHAPE | {"head_dim": 64}), tmp_path)
    tracemalloc.start()  # sees numpy's arrays, and not torch's
    table = RotaryTable(config, 2**15 + 5, CPU)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2**23
    positions = torch.tensor([0, 4095, 4096, 2**15 + 4])
    angles = positions.double()[:, None] * (1e4 ** (-torch.arange(0, 64, 2) / 64)).double()
    torch.testing.assert_close(table(positions)[0][:, 0], angles.cos().float(), atol=5e-3, rtol=0)


def test_gemma3_has_two_tables(tmp_path: Path) -> None:
    """Layers with full attention use the scaled global base, layers with a window their own base."""
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    layers = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(**SHAPE, head_dim=16, rope_parameters=ropes, layer_types=layers)
    module, ours = Gemma3RotaryEmbedding(config), described(config, tmp_path)
    for kind, table_config in (("full_attention", ours), ("sliding_attention", local_rotary(ours))):
        found = RotaryTable(table_config, 64, CPU)(torch.arange(64))
        torch.testing.assert_close(found, theirs(module, 64, kind), atol=1e-5, rtol=0)


def test_a_config_without_a_local_base_has_no_local_table(tmp_path: Path) -> None:
    """A plain Llama has no local base, so asking for its table is an error."""
    with pytest.raises(ValueError, match="no RoPE base of their own"):
        local_rotary(described(transformers.LlamaConfig(**SHAPE), tmp_path))


@pytest.mark.parametrize(
    ("rope", "follows"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, False),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, False),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, True),
        (LONGROPE | {"partial_rotary_factor": 1.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, True),
    ],
)
def test_angles_that_follow_the_context_are_known(tmp_path: Path, rope: dict[str, object], follows: bool) -> None:
    """``angles_follow_context`` holds exactly if the tables of two served contexts differ."""
    config = described(transformers.LlamaConfig(**SHAPE, rope_parameters=rope), tmp_path)
    assert angles_follow_context(config) == follows
    short, long = (RotaryTable(config, num_positions, CPU)(torch.arange(32)) for num_positions in (32, 128))
    assert torch.equal(short[0], long[0]) != follows
