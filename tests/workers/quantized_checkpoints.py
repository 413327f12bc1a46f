"""Quantized checkpoints of small models, packed number by number in the plainest way, as the formats' reference.

Each ``pack_*`` function takes a layer, and returns the tensors that a checkpoint of that format has for it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.workers.small_models import save_model

Integers = NDArray[np.int64]
Tensors = dict[str, Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output in each nibble of a word, from the lowest on

GROUP = 32


@dataclass(frozen=True)
class Layer:
    """A layer's quantized numbers: weight[o, i] = (numbers[o, i] - zeros[o, g]) * scales[o, g]."""

    name: str
    numbers: Integers  # [O, I]
    zeros: Integers  # [O, G]
    scales: Tensor  # [O, G] float16
    group_of: Integers  # [I]

    @property
    def floats(self) -> Tensor:
        weight = np.zeros(self.numbers.shape, np.float32)
        scales = self.scales.float().numpy()
        for output, column in np.ndindex(weight.shape):
            group = self.group_of[column]
            weight[output, column] = (self.numbers[output, column] - self.zeros[output, group]) * scales[output, group]
        return torch.from_numpy(weight)


def _words(numbers: Integers, bits: int, order: tuple[int, ...]) -> Tensor:
    """[R, C] -> int32 [R, C / n]: number ``order[k]`` of each n in bits k * bits and following."""
    per_word = 32 // bits
    words = np.zeros((numbers.shape[0], -(-numbers.shape[1] // per_word)), np.uint32)
    for row, column in np.ndindex(words.shape):
        for place, source in enumerate(order):
            if column * per_word + source < numbers.shape[1]:
                words[row, column] |= np.uint32(int(numbers[row, column * per_word + source]) << (place * bits))
    return torch.from_numpy(words.view(np.int32).copy())


def pack_awq(layer: Layer, bits: int = 4) -> Tensors:
    return {
        f"{layer.name}.qweight": _words(layer.numbers.T, bits, AWQ_ORDER),
        f"{layer.name}.qzeros": _words(layer.zeros.T, bits, AWQ_ORDER),
        f"{layer.name}.scales": layer.scales.T.contiguous(),
    }


def pack_gptq(layer: Layer, bits: int = 4, offset: int = 1) -> Tensors:
    """``offset``: what the first format takes from each zero point."""
    order = tuple(range(32 // bits))
    return {
        f"{layer.name}.qweight": _words(layer.numbers, bits, order).T.contiguous(),
        f"{layer.name}.qzeros": _words(layer.zeros.T - offset, bits, order),
        f"{layer.name}.scales": layer.scales.T.contiguous(),
        f"{layer.name}.g_idx": torch.from_numpy(layer.group_of.astype(np.int32)),
        f"{layer.name}.bias": torch.zeros(len(layer.numbers), dtype=torch.float16),
    }


def pack_rows(layer: Layer, bits: int = 4, symmetric: bool = True) -> Tensors:
    order = tuple(range(32 // bits))
    tensors = {
        f"{layer.name}.weight_packed": _words(layer.numbers, bits, order),
        f"{layer.name}.weight_scale": layer.scales,
        f"{layer.name}.weight_shape": torch.tensor(layer.numbers.shape),
    }
    if not symmetric:
        tensors[f"{layer.name}.weight_zero_point"] = _words(layer.zeros.T, bits, order).T.contiguous()
    return tensors


def quantized_layer(
    name: str, weight: Tensor, bits: int, symmetric: bool, group: int = GROUP, shuffled: bool = False
) -> Layer:
    """Round-to-nearest. ``shuffled``: neighbouring inputs are of different groups, as after GPTQ's desc_act."""
    num_outputs, num_inputs = weight.shape
    group = group or num_inputs
    group_of = np.arange(num_inputs) // group
    if shuffled:
        np.random.default_rng(0).shuffle(group_of)
    highest = (1 << bits) - 1
    groups = group_of.max() + 1
    numbers = np.zeros((num_outputs, num_inputs), np.int64)
    zeros = np.zeros((num_outputs, groups), np.int64)
    scales = torch.zeros(num_outputs, groups, dtype=torch.float16)
    for number in range(groups):
        columns = np.flatnonzero(group_of == number)
        part = weight[:, columns].double()
        least, greatest = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            greatest = torch.maximum(greatest, -least)
            least = -greatest
        scale = ((greatest - least) / highest).to(torch.float16)
        zero = torch.full_like(least, 1 << (bits - 1)) if symmetric else (-least / scale.double()).round()
        zeros[:, number] = zero.clamp(1, highest).numpy().astype(np.int64)
        scales[:, number] = scale
        rounded = (part / scale.double()[:, None]).round().numpy() + zeros[:, number, None]
        numbers[:, columns] = np.clip(rounded, 0, highest).astype(np.int64)
    return Layer(name, numbers, zeros, scales, group_of)


def _is_quantized(name: str) -> bool:
    return name.endswith("_proj.weight")


def save_pair(
    folder: Path,
    config: Mapping[str, Any],
    pack: Callable[[str, Tensor], tuple[Tensors, Tensor]],
    architecture: str = "llama",
    **changes: Any,
) -> tuple[Path, Path]:
    """Two folders of one model: packed, with ``config`` as its quantization_config, and in float32.

    ``pack`` gives a layer's packed tensors, and the floats that they stand for.
    """
    plain, packed = folder / "plain", folder / "packed"
    save_model(plain, architecture, **changes)
    packed.mkdir()
    (packed / "tokenizer.json").write_text("{}", encoding="utf-8")
    raw = json.loads((plain / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(raw | {"quantization_config": dict(config)}))
    floats, stored = load_file(plain / "model.safetensors"), {}
    for name, tensor in list(floats.items()):
        if _is_quantized(name):
            tensors, floats[name] = pack(name.removesuffix(".weight"), tensor)
            stored.update(tensors)
        else:
            stored[name] = tensor
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(floats, plain / "model.safetensors", metadata={"format": "pt"})
    return packed, plain


def save_integers(folder: Path, form: str, *, bits: int = 4, **changes: Any) -> tuple[Path, Path]:
    """A packed and a plain folder; ``form`` is a key of INTEGER_FORMS."""
    config, pack, symmetric, group, shuffled = INTEGER_FORMS[form]

    def pack_layer(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        layer = quantized_layer(name, weight, bits, symmetric, group, shuffled)
        return pack(layer, bits), layer.floats

    return save_pair(folder, config(bits), pack_layer, **changes)


def compressed(stored_as: str, **weights: Any) -> dict[str, Any]:
    """compressed-tensors' config with one scheme."""
    return {
        "quant_method": "compressed-tensors",
        "format": stored_as,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _gptq(bits: int, **changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": False, "sym": True} | changes


INTEGER_FORMS: dict[str, tuple[Callable[[int], dict[str, Any]], Callable[[Layer, int], Tensors], bool, int, bool]] = {
    "awq": (
        lambda bits: {"quant_method": "awq", "bits": bits, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        pack_awq,
        False,
        GROUP,
        False,
    ),
    "gptq": (_gptq, pack_gptq, True, GROUP, False),
    "gptq, asymmetric": (lambda bits: _gptq(bits, sym=False), pack_gptq, False, GROUP, False),
    "gptq, one group": (lambda bits: _gptq(bits, group_size=-1), pack_gptq, False, 0, False),
    "gptq, act-order": (lambda bits: _gptq(bits, desc_act=True), pack_gptq, False, GROUP, True),
    "gptq_v2": (
        lambda bits: _gptq(bits, checkpoint_format="gptq_v2"),
        lambda layer, bits: pack_gptq(layer, bits, 0),
        False,
        GROUP,
        False,
    ),
    "pack-quantized": (
        lambda bits: compressed(
            "pack-quantized", num_bits=bits, type="int", symmetric=True, strategy="group", group_size=GROUP
        ),
        pack_rows,
        True,
        GROUP,
        False,
    ),
    "pack-quantized, asymmetric": (
        lambda bits: compressed(
            "pack-quantized", num_bits=bits, type="int", symmetric=False, strategy="group", group_size=GROUP
        ),
        lambda layer, bits: pack_rows(layer, bits, symmetric=False),
        False,
        GROUP,
        False,
    ),
    "pack-quantized, one group": (
        lambda bits: compressed("pack-quantized", num_bits=bits, type="int", symmetric=True, strategy="channel"),
        pack_rows,
        True,
        0,
        False,
    ),
}
"""The config by the number of bits, the packing, whether zero points are the middle, inputs a group, and act-order."""

BLOCK = (48, 32)


def save_fp8(folder: Path, form: str, **changes: Any) -> tuple[Path, Path]:
    """A packed and a plain folder; ``form`` is a key of FP8_FORMS."""
    config, scale_name, scale_rows, scale_columns, number = FP8_FORMS[form]
    largest = 127.0 if number == torch.int8 else 448.0

    def pack_layer(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        num_outputs, num_inputs = weight.shape
        rows, columns = scale_rows or num_outputs, scale_columns or num_inputs
        numbers, floats = torch.empty(weight.shape, dtype=number), torch.empty(weight.shape)
        scales = torch.empty(-(-num_outputs // rows), -(-num_inputs // columns))
        for row, column in np.ndindex(*scales.shape):
            at = (slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns))
            scales[row, column] = weight[at].abs().max() / largest
            scaled = weight[at] / scales[row, column]
            numbers[at] = scaled.round().to(number) if number == torch.int8 else scaled.to(number)
            floats[at] = numbers[at].float() * scales[row, column]
        if scale_rows == 0:
            scales = scales.reshape(())
        return {
            f"{name}.weight": numbers,
            f"{name}.{scale_name}": scales,
            f"{name}.input_scale": torch.ones(1),
        }, floats

    return save_pair(folder, config, pack_layer, **changes)


FP8_FORMS: dict[str, tuple[dict[str, Any], str, int, int, torch.dtype]] = {
    "fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale", 0, 0, torch.float8_e4m3fn),
    "fp8, blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)},
        "weight_scale_inv",
        *BLOCK,
        torch.float8_e4m3fn,
    ),
    "fbgemm_fp8": ({"quant_method": "fbgemm_fp8"}, "weight_scale", 1, 0, torch.float8_e4m3fn),
    "float-quantized": (
        compressed("float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel"),
        "weight_scale",
        1,
        0,
        torch.float8_e4m3fn,
    ),
    "float-quantized, one scale": (
        compressed("float-quantized", num_bits=8, type="float", symmetric=True, strategy="tensor"),
        "weight_scale",
        0,
        0,
        torch.float8_e4m3fn,
    ),
    "float-quantized, blocks": (
        compressed(
            "float-quantized",
            num_bits=8,
            type="float",
            symmetric=True,
            strategy="block",
            block_structure=list(BLOCK),
        ),
        "weight_scale",
        *BLOCK,
        torch.float8_e4m3fn,
    ),
    "int-quantized": (
        compressed("int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel"),
        "weight_scale",
        1,
        0,
        torch.int8,
    ),
}
"""The config, the scales' name, outputs and inputs that share a scale (0: all), and the numbers' type."""
