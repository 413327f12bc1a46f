"""Every architecture gives transformers' numbers, from every format, and the same bits in any batch."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from actorserve.core.messages import StepPlan
from actorserve.model_files.describe import describe
from actorserve.model_files.description import ModelDescription
from tests.workers.small_models import (
    ARCHITECTURES,
    LONG_ROPE_FACTORS,
    VOCAB_SIZE,
    WINDOW,
    SmallModel,
    save_model,
    write_gguf,
)
from workers.engine_options import EngineOptions
from workers.engines.torch_engine import TorchEngine

NOT_IN_GGUF = ("opt", "qwen3 experts, raw shares", "gemma3, scale of its own")
IN_GGUF = [name for name in ARCHITECTURES if name not in NOT_IN_GGUF]
SAME_BITS = [name for name in ARCHITECTURES if "," not in name and name not in ("llama", "phi4")]
NUM_TOKENS, NUM_PREFILLED = 100, 92


def sequence(length: int, seed: int = 0) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.randrange(VOCAB_SIZE) for _ in range(length))


TOKENS = sequence(NUM_TOKENS)


def engine_of(description: ModelDescription, dtype: str = "float32", **settings: Any) -> TorchEngine:
    return TorchEngine(description, EngineOptions(dtype=dtype, kv_cache_bytes=16 * 2**20, **settings))


def last_logits(engine: TorchEngine, num_tokens: int = NUM_TOKENS) -> torch.Tensor:
    """Logits after a prompt and after each of the few decoded tokens that follow it."""
    table = tuple(range(7 * engine.layer_groups.num_groups))
    prefilled = num_tokens - NUM_TOKENS + NUM_PREFILLED
    plans = [StepPlan(0, ("a",), (0,), (TOKENS[:prefilled],), (table,), (True,))]
    plans += [StepPlan(at, ("a",), (at,), ((TOKENS[at],),), (table,), (True,)) for at in range(prefilled, num_tokens)]
    return torch.cat([engine.logits(plan) for plan in plans])


def expected_logits(model: SmallModel, num_tokens: int = NUM_TOKENS) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.reference(torch.tensor([TOKENS[:num_tokens]])).logits[0]
    return logits[num_tokens - NUM_TOKENS + NUM_PREFILLED - 1 :]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_the_references(tmp_path: Path, architecture: str) -> None:
    """Logits of a prompt longer than any window, and of the decode steps after it, lie within 1e-3 of transformers'."""
    model = save_model(tmp_path, architecture)
    found = last_logits(engine_of(describe(tmp_path)))
    assert (found - expected_logits(model)).abs().max() < 1e-3


@pytest.mark.parametrize("architecture", IN_GGUF)
def test_gguf_and_folder_are_one_model(tmp_path: Path, architecture: str) -> None:
    """A GGUF file, with another layout of heads, norms and fused tensors, gives the logits of its folder."""
    save_model(tmp_path, architecture)
    factors = LONG_ROPE_FACTORS if "longrope" in architecture else {}
    path = write_gguf(tmp_path, tmp_path / "small.gguf", factors=factors)
    found, expected = (last_logits(engine_of(describe(place))) for place in (path, tmp_path))
    assert (found - expected).abs().max() < 1e-3


@pytest.mark.parametrize(("architecture", "kind"), [("llama", "Q8_0"), ("phi3", "Q4_0"), ("qwen3 experts", "Q4_1")])
def test_quantized_gguf_files_hold_the_same_model(tmp_path: Path, architecture: str, kind: str) -> None:
    """Weights that a quantized type can represent give the same logits from a file of that type and from a folder."""
    quantized = GGMLQuantizationType[kind]
    save_model(tmp_path, architecture, rounded_to=quantized)
    path = write_gguf(tmp_path, tmp_path / "small.gguf", quantized)
    found, expected = (last_logits(engine_of(describe(place))) for place in (path, tmp_path))
    assert (found - expected).abs().max() < 1e-2


@pytest.mark.parametrize("architecture", ["mistral", "phi3", "gemma3"])
def test_windows_are_used(tmp_path: Path, architecture: str) -> None:
    """Removing windows changes the logits of contexts longer than the window, and no others."""
    save_model(tmp_path, architecture)
    description = describe(tmp_path)
    config = description.config
    assert WINDOW in config.windows
    open_config = replace(config, windows=(0,) * config.num_layers, local_rope_theta=config.rope_theta)
    windowed, open_ = engine_of(description), engine_of(replace(description, config=open_config))
    if architecture != "gemma3":  # its windows decide a layer's angles, too
        assert (last_logits(windowed, WINDOW) - last_logits(open_, WINDOW)).abs().max() < 1e-4
    assert (last_logits(windowed) - last_logits(open_)).abs().max() > 1e-2


def test_long_factors_are_for_long_contexts(tmp_path: Path) -> None:
    """LongRoPE's short factors apply if no context can exceed the length that the model was first trained with."""
    model = save_model(tmp_path, "phi3 longrope", max_position_embeddings=256)
    engine = engine_of(describe(tmp_path), max_context_tokens=64)
    found, expected = last_logits(engine, 60), expected_logits(model, 60)
    assert (found - expected).abs().max() < 1e-3
    longer = engine_of(describe(tmp_path), max_context_tokens=65)
    assert (last_logits(longer, 60) - expected).abs().max() > 1e-2
    assert longer.kind != engine.kind


@pytest.mark.parametrize("architecture", ["qwen3 experts", "mixtral"])
def test_of_equal_experts_the_first_are_taken(tmp_path: Path, architecture: str) -> None:
    """If the router gives all experts the same share, the lower numbers are taken, and others do not matter."""
    model = save_model(tmp_path, architecture)
    logits = []
    for changed in (0.0, 1.0):
        with torch.no_grad():
            for name, parameter in model.reference.named_parameters():
                if name.endswith("mlp.gate.weight"):
                    parameter.zero_()
                elif ".experts." in name:
                    parameter[2:] += changed
        model.reference.save_pretrained(tmp_path)
        logits.append(last_logits(engine_of(describe(tmp_path))))
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [*((name, "float32") for name in SAME_BITS), ("qwen3 experts", "int8"), ("gemma3", "int8"), ("opt", "int8")],
)
def test_logits_have_the_same_bits_in_any_batch(
    tmp_path: Path, make_schedule: Any, architecture: str, dtype: str
) -> None:
    """A request's logits are the same bits alone and in mixed batches, in any chunks, and preempted."""
    save_model(tmp_path, architecture)
    engine = engine_of(describe(tmp_path), dtype)
    num_groups = engine.layer_groups.num_groups
    requests = {f"r{n}": sequence(length, seed=length) for n, length in enumerate((1, 5, 16, 31, 64, 70, 100, 130))}
    alone: dict[tuple[str, int], torch.Tensor] = {}
    for name, tokens in requests.items():
        schedule = make_schedule(engine.num_blocks, 16, seed=0, preempts=False, num_groups=num_groups)
        alone |= schedule.play({name: tokens}, lambda plan: list(engine.logits(plan)), chunks=(1, 50))
    schedule = make_schedule(engine.num_blocks, 16, seed=1, num_groups=num_groups)
    mixed = schedule.play(requests, lambda plan: list(engine.logits(plan)))
    common = alone.keys() & mixed.keys()
    assert {(name, len(tokens) - 1) for name, tokens in requests.items()} <= common
    assert all(torch.equal(alone[place], mixed[place]) for place in common)
