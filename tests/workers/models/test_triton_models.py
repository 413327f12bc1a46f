"""Models whose layers run in the kernel for stacked and packed weights, in Triton's interpreter."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from actorserve.core.messages import StepPlan
from actorserve.errors import ModelError
from actorserve.model_files.describe import describe
from tests.workers.quantized_checkpoints import save_fp8, save_integers
from tests.workers.small_models import save_model
from tests.workers.triton import interpreted, needs_interpreter, run_interpreted
from workers.engine_options import EngineOptions
from workers.engines.torch_engine import TorchEngine
from workers.kernels.choose import Kernels
from workers.kernels.triton import grouped

PLAN = StepPlan(0, ("a", "b"), (0, 0), (tuple(range(40, 60)), (7,)), ((0, 1), (2,)), (True, True))


@needs_interpreter
def test_models_in_the_interpreter() -> None:
    """All interpreted tests of this file pass in a process whose Triton interprets."""
    run_interpreted(__file__)


def logits_of(folder: Path) -> Tensor:
    return TorchEngine(describe(folder), EngineOptions(dtype="float32", kv_cache_bytes=2**20)).logits(PLAN)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A CPU's engines take the kernel, as a GPU's do. The forms of the weights that it multiplied."""
    forms: list[str] = []
    kernel = grouped.run

    def run(x: Tensor, weight: grouped.StackedWeight, *arguments: object, **options: object) -> Tensor:
        forms.append(weight.form)
        return kernel(x, weight, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(grouped, "run", run)
    monkeypatch.setattr("workers.models.experts.run", run)
    monkeypatch.setattr(Kernels, "runs_grouped", True)
    monkeypatch.setattr(Kernels, "rows_are_independent", True)  # so that no tiles are probed
    return forms


def check(packed: Path, plain: Path, runs: list[str], form: str, per_layer: int) -> None:
    found = logits_of(packed)
    assert runs == [form] * per_layer * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernels, "runs_grouped", False)
        torch.testing.assert_close(found, logits_of(plain), rtol=1e-3, atol=1e-3)


@interpreted
@pytest.mark.parametrize(
    "form", ["awq", "gptq", "gptq, act-order", "gptq, one group", "pack-quantized", "pack-quantized, asymmetric"]
)
def test_interpreted_integers_equal_their_floats(tmp_path: Path, form: str, runs: list[str]) -> None:
    """A checkpoint of 4-bit groups is computed from its integers, and agrees with the model of its floats."""
    check(*save_integers(tmp_path, form), runs, "int4", 4)


@interpreted
@pytest.mark.parametrize("form", ["fp8", "fp8, blocks", "float-quantized"])
def test_interpreted_fp8_equals_its_floats(tmp_path: Path, form: str, runs: list[str]) -> None:
    """A checkpoint of FP8 numbers is computed from them, and agrees with the model of its floats."""
    check(*save_fp8(tmp_path, form), runs, "fp8", 4)


@interpreted
def test_interpreted_heads_are_reordered(tmp_path: Path, runs: list[str]) -> None:
    """Heads whose rows have another order than RoPE's are reordered in packed weights, too."""
    check(*save_integers(tmp_path, "gptq", architecture="phi4"), runs, "int4", 4)


@interpreted
@pytest.mark.parametrize("architecture", ["qwen3 experts", "qwen3 experts, raw shares", "mixtral"])
def test_interpreted_experts_equal_the_loop(tmp_path: Path, architecture: str, runs: list[str]) -> None:
    """Experts that are multiplied at once agree with one expert after another."""
    save_model(tmp_path, architecture)
    check(tmp_path, tmp_path, runs, "plain", 3)


@interpreted
def test_interpreted_packed_experts_equal_their_floats(tmp_path: Path, runs: list[str]) -> None:
    """Experts of a quantized checkpoint are multiplied at once from their integers."""
    packed, plain = save_integers(tmp_path, "gptq", architecture="qwen3 experts")
    found = logits_of(packed)
    assert runs == ["int4", "int4", "plain", "int4", "int4"] * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernels, "runs_grouped", False)
        torch.testing.assert_close(found, logits_of(plain), rtol=1e-3, atol=1e-3)


@interpreted
def test_interpreted_experts_that_differ_are_computed_from_floats(tmp_path: Path, runs: list[str]) -> None:
    """Experts whose inputs are in orders of their own cannot be stacked, so their floats are."""
    packed, plain = save_integers(tmp_path, "gptq, act-order", architecture="qwen3 experts")
    found = logits_of(packed)
    assert runs == ["int4", "int4", "plain", "plain", "int4"] * 2  # down has one group of inputs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernels, "runs_grouped", False)
        torch.testing.assert_close(found, logits_of(plain), rtol=1e-3, atol=1e-3)


@interpreted
def test_interpreted_numbers_that_are_nan_are_named(tmp_path: Path, runs: list[str]) -> None:
    """A scale that is not finite is refused by the tensor's name, although no float is made of it."""
    packed, _ = save_integers(tmp_path, "gptq")
    tensors = load_file(packed / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.scales"][0, 0] = torch.inf
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"down_proj\.weight holds NaN or infinity"):
        logits_of(packed)
