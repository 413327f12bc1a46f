"""A quantized checkpoint is served with the numbers that it stands for."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actorserve.core.messages import StepPlan
from actorserve.errors import ModelError
from actorserve.model_files.describe import describe
from tests.workers.quantized_checkpoints import (
    FP8_FORMS,
    GROUP,
    INTEGER_FORMS,
    compressed,
    save_fp8,
    save_integers,
)
from workers.engine_options import EngineOptions
from workers.engines.torch_engine import TorchEngine

PLAN = StepPlan(0, ("a",), (0,), (tuple(range(40, 60)),), (tuple(range(2)),), (True,))
DOWN = "model.layers.1.mlp.down_proj"


def logits_of(path: Path, dtype: str = "float32") -> torch.Tensor:
    return TorchEngine(describe(path), EngineOptions(dtype=dtype, kv_cache_bytes=2**20)).logits(PLAN)


@pytest.mark.parametrize("form", INTEGER_FORMS)
def test_integers_give_the_logits_of_their_floats(tmp_path: Path, form: str) -> None:
    """A checkpoint of 4-bit groups gives the bits of the float model that its numbers stand for."""
    packed, plain = save_integers(tmp_path, form)
    assert torch.equal(logits_of(packed), logits_of(plain))


@pytest.mark.parametrize("form", ["gptq, act-order", "pack-quantized, asymmetric"])
def test_eight_bits_give_the_logits_of_their_floats(tmp_path: Path, form: str) -> None:
    """A checkpoint of 8-bit groups gives the bits of the float model that its numbers stand for."""
    packed, plain = save_integers(tmp_path, form, bits=8)
    assert torch.equal(logits_of(packed), logits_of(plain))


@pytest.mark.parametrize("form", FP8_FORMS)
def test_scaled_numbers_give_the_logits_of_their_floats(tmp_path: Path, form: str) -> None:
    """A checkpoint of FP8 or int8 numbers gives the bits of the float model that its numbers stand for."""
    packed, plain = save_fp8(tmp_path, form)
    assert torch.equal(logits_of(packed), logits_of(plain))


@pytest.mark.parametrize("architecture", ["phi4", "qwen3 experts"])
def test_fused_tensors_and_experts_are_unpacked(tmp_path: Path, architecture: str) -> None:
    """Queries within a fused tensor, heads in another order, and single experts are unpacked."""
    packed, plain = save_integers(tmp_path, "gptq", architecture=architecture)
    assert torch.equal(logits_of(packed), logits_of(plain))


def test_integers_of_our_own_are_made(tmp_path: Path) -> None:
    """On a CPU the default mode quantizes the checkpoint's numbers as it does those of floats."""
    packed, plain = save_integers(tmp_path, "awq")
    assert torch.equal(logits_of(packed, "auto"), logits_of(plain, "auto"))


def test_layers_that_were_left_out_are_floats(tmp_path: Path) -> None:
    """A layer that the quantizer left as floats is read as floats, however the config lists it."""
    packed, plain = save_integers(tmp_path, "awq")
    tensors, floats = (load_file(folder / "model.safetensors") for folder in (packed, plain))
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{DOWN}.")}
    name = f"{DOWN}.weight"
    save_file(kept | {name: floats[name]}, packed / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits_of(packed), logits_of(plain))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "'bitsandbytes' is not supported; supported: awq, gptq, fp8, fbgemm_fp8, compressed-tensors",
        ),
        ({}, "'unknown' is not supported"),
        ({"quant_method": "awq", "bits": 3}, "awq's bits 3 is not supported; supported: 4"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv' is not supported; supported: gemm"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point False is not supported"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3 is not supported; supported: 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supp"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size \[128\] is not supported"),
        (compressed("nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized' is not supported; supported: pack-quan"),
        (compressed("pack-quantized", num_bits=2), "num_bits 2 is not supported"),
        (compressed("pack-quantized", num_bits=4, type="float"), "type 'float' is not supported; supported: int"),
        (compressed("float-quantized", num_bits=4, type="float"), "weights 'other than symmetric with num_bits 8'"),
        (compressed("float-quantized", num_bits=8, type="float", strategy="token"), "strategy 'token' is not"),
        (compressed("float-quantized", num_bits=8) | {"config_groups": {}}, "config_groups"),
        (compressed("float-quantized", num_bits=8) | {"transform_config": {"u": {}}}, "transform_config"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, config: dict[str, object], problem: str) -> None:
    """A quantization that cannot be read is refused in one line with its name, and with what can be read."""
    packed, _ = save_integers(tmp_path, "awq")
    raw = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    with pytest.raises(ModelError, match=problem) as caught:
        describe(packed)
    assert "\n" not in str(caught.value)


def test_a_config_that_does_not_fit_the_files_is_refused(tmp_path: Path) -> None:
    """Groups of another size than the config's are refused by the name of the tensor."""
    packed, _ = save_integers(tmp_path, "gptq")
    raw = json.loads((packed / "config.json").read_text())
    raw["quantization_config"]["group_size"] = 2 * GROUP
    (packed / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=r"tensor model\.layers\.\d\.\S+\.scales has shape"):
        describe(packed)


@pytest.mark.parametrize("group", [-1, 100])
def test_a_group_that_does_not_exist_is_refused(tmp_path: Path, group: int) -> None:
    """An input of a group that does not exist is refused by the name of the tensor."""
    packed, _ = save_integers(tmp_path, "gptq")
    tensors = load_file(packed / "model.safetensors")
    tensors[f"{DOWN}.g_idx"][3] = group
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"down_proj\.weight: an input's group is not among"):
        logits_of(packed)


@pytest.mark.parametrize(("form", "part"), [("gptq", "qweight"), ("gptq", "scales"), ("gptq", "qzeros")])
def test_a_missing_part_or_another_type_is_named(tmp_path: Path, form: str, part: str) -> None:
    """A packed layer of which a tensor is missing or has another type is refused by the tensor's name."""
    packed, _ = save_integers(tmp_path, form)
    tensors = load_file(packed / "model.safetensors")
    stored = tensors.pop(f"{DOWN}.{part}")
    for wrong in ({}, {f"{DOWN}.{part}": stored.to(torch.int64)}):
        save_file(tensors | wrong, packed / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.down_proj\."):
            describe(packed)


def test_numbers_that_are_nan_are_named(tmp_path: Path) -> None:
    """An FP8 NaN among a layer's numbers is refused with the tensor's name."""
    packed, _ = save_fp8(tmp_path, "fp8, blocks")
    tensors = load_file(packed / "model.safetensors")
    tensors[f"{DOWN}.weight"].view(torch.uint8)[3, 5] = 0x7F
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"down_proj\.weight holds NaN"):
        logits_of(packed)
