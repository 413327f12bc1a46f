"""Reads config.json's ``quantization_config``: how a Hugging Face folder's linear layers are packed.

Which layers are packed is told by the files' tensors, because methods spell their lists of exceptions differently.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple

from actorserve.model_files.description import TensorSpec
from actorserve.model_files.packing import PackedIntegers, Packing, ScaledNumbers, Shape
from actorserve.model_files.values import Values

# Scales of inputs and of KV, which we keep in floats, and a shape that the config tells as well.
_HARMLESS = re.compile(r"\.(input_scale|output_scale|[kvq]_scale|kv_scale|weight_shape)$")
_GPTQ_HARMLESS = re.compile(r"\.bias$")  # AutoGPTQ gives every layer a bias of zeros
_AWQ_VERSIONS, _GPTQ_FORMATS = ("gemm",), ("gptq", "gptq_v2")
_COMPRESSED_FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")
_BITS = (4, 8)

FindPacking = Callable[[str, Mapping[str, Shape]], Packing | None]
"""From a weight's stored name, and the shapes of all stored tensors by name. None: the weight is not packed."""


class Quantization(NamedTuple):
    """A folder's quantization. ``find`` tells how a weight is packed."""

    method: str
    find: FindPacking

    def packed(self, spec: TensorSpec, shapes: Mapping[str, Shape]) -> TensorSpec:
        """``spec`` with its packing, if the files pack it."""
        is_linear = len(spec.stored_shape) == 2 and spec.stored_name.endswith(".weight")
        return spec._replace(packing=self.find(spec.stored_name, shapes)) if is_linear else spec

    def is_harmless(self, name: str) -> bool:
        """Whether the files may have this tensor, although the decoder does not use it."""
        has_zero_biases = self.method == "gptq" and _GPTQ_HARMLESS.search(name) is not None
        return has_zero_biases or _HARMLESS.search(name) is not None


def read_quantization(values: Values) -> Quantization | None:
    """The quantization that config.json names; None if its weights are plain.

    Raises: ModelError that names the method, and what is supported.
    """
    if not values.has("quantization_config"):
        return None
    config = values.of(values.mapping("quantization_config"))
    method = config.text("quant_method", "unknown")
    if method not in _METHODS:
        supported = ", ".join(_METHODS)
        raise values.error(
            f"quantization_config {method[:40]!r} is not supported; supported: {supported}, float weights, and GGUF"
        )
    return Quantization(method, _METHODS[method](config))


def _awq(config: Values) -> FindPacking:
    _one_of(config, "version", _AWQ_VERSIONS, config.text("version", "gemm").lower())
    bits = config.integer("bits" if config.has("bits") else "w_bit")
    if bits != 4:
        raise config.unsupported("awq's bits", bits, (4,))
    if not config.flag("zero_point", True):
        raise config.unsupported("awq's zero_point", False, (True,))
    inputs = _group_inputs(config, "group_size" if config.has("group_size") else "q_group_size")
    return partial(_find_integers, PackedIntegers("awq", 4, inputs))


def _gptq(config: Values) -> FindPacking:
    stored_as = config.text("checkpoint_format", "gptq")
    _one_of(config, "checkpoint_format", _GPTQ_FORMATS, stored_as)
    offset = 1 if stored_as == "gptq" else 0
    return partial(
        _find_integers, PackedIntegers("gptq", _bits(config, "bits"), _group_inputs(config), zero_offset=offset)
    )


def _scaled(scale_names: tuple[str, ...], config: Values) -> FindPacking:
    block = _block(config, "weight_block_size") if config.has("weight_block_size") else None
    return partial(_find_scaled, "F8_E4M3", scale_names, block)


def _compressed(config: Values) -> FindPacking:
    stored_as = config.text("format")
    _one_of(config, "compressed-tensors' format", _COMPRESSED_FORMATS, stored_as)
    if config.has("transform_config") and config.mapping("transform_config"):
        raise config.unsupported("transform_config", "of compressed-tensors")
    groups = [config.of(config.of(config.mapping("config_groups")).mapping(name)) for name in _names(config)]
    schemes = [config.of(group.mapping("weights")) for group in groups]
    found = [_compressed_scheme(scheme, stored_as) for scheme in schemes]
    if not found or any((each.func, each.args) != (found[0].func, found[0].args) for each in found):
        raise config.unsupported("config_groups", "with other than one scheme for weights")
    return found[0]


def _compressed_scheme(scheme: Values, stored_as: str) -> "partial[Packing | None]":
    kind, strategy = scheme.text("type", "int"), scheme.text("strategy", "tensor")
    bits = _bits(scheme, "num_bits")
    if stored_as == "pack-quantized":
        _one_of(scheme, "type", ("int",), kind)
        _one_of(scheme, "strategy", ("group", "channel"), strategy)
        inputs = _group_inputs(scheme) if strategy == "group" else 0
        has_zeros = not scheme.flag("symmetric", True)
        return partial(_find_integers, PackedIntegers("rows", bits, inputs, has_zeros))
    if bits != 8 or not scheme.flag("symmetric", True):
        raise scheme.unsupported("weights", "other than symmetric with num_bits 8")
    _one_of(scheme, "strategy", ("tensor", "channel", "block"), strategy)
    block = _block(scheme, "block_structure") if strategy == "block" else None
    number: Literal["F8_E4M3", "I8"] = "F8_E4M3" if kind == "float" else "I8"
    return partial(_find_scaled, number, ("weight_scale",), block)


_METHODS: dict[str, Callable[[Values], FindPacking]] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": partial(_scaled, ("weight_scale_inv", "weight_scale")),
    "fbgemm_fp8": partial(_scaled, ("weight_scale",)),
    "compressed-tensors": _compressed,
}


def _find_integers(packing: PackedIntegers, stored_name: str, shapes: Mapping[str, Shape]) -> Packing | None:
    parts = packing._replace(has_order=packing.layout != "awq").parts(stored_name, (1, 1))
    if parts["numbers"].name not in shapes:
        return None
    return packing._replace(has_order="group_of_input" in parts and parts["group_of_input"].name in shapes)


def _find_scaled(
    kind: Literal["F8_E4M3", "I8"],
    scale_names: tuple[str, ...],
    block: tuple[int, int] | None,
    stored_name: str,
    shapes: Mapping[str, Shape],
) -> Packing | None:
    layer = stored_name.removesuffix(".weight")
    for scale_name in scale_names:
        if f"{layer}.{scale_name}" in shapes:
            return ScaledNumbers(kind, scale_name, shapes[f"{layer}.{scale_name}"], block)
    return None


def _bits(config: Values, key: str) -> Literal[4, 8]:
    bits = config.integer(key)
    if bits not in _BITS:
        raise config.unsupported(key, bits, _BITS)
    return 4 if bits == 4 else 8


def _group_inputs(config: Values, key: str = "group_size") -> int:
    """0 if all inputs are one group, for which files have -1."""
    inputs = config.integer(key, 128, minimum=-1)
    return max(0, inputs)


def _block(config: Values, key: str) -> tuple[int, int]:
    sizes = config.integers(key)
    if len(sizes) != 2 or min(sizes) < 1:
        raise config.unsupported(key, sizes, ("[rows, columns]",))
    return sizes[0], sizes[1]


def _names(config: Values) -> list[str]:
    return sorted(name for name in config.mapping("config_groups"))


def _one_of(config: Values, key: str, supported: tuple[str, ...], found: str) -> None:
    if found not in supported:
        raise config.unsupported(key, found, supported)
