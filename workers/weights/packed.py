"""The weights of quantized checkpoints: unpacked into one form, from which every numeric mode makes its own."""

from collections.abc import Callable

import torch
from torch import Tensor

from actorserve.model_files.description import TensorSpec
from actorserve.model_files.packing import PackedIntegers, Part, ScaledNumbers
from workers.kernels.grouped_weight import GroupedWeight

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # output i of eight is nibble _AWQ_PLACES[i] of its word


def unpack(spec: TensorSpec, read: Callable[[Part], Tensor]) -> GroupedWeight:
    """The weight ``spec``, whose stored tensors ``read`` reads.

    Raises: ValueError if an input's group does not exist.
    """
    if isinstance(spec.packing, PackedIntegers):
        weight = _unpack_integers(spec.packing, spec, read)
    elif isinstance(spec.packing, ScaledNumbers):
        weight = _unpack_scaled(spec.packing, spec, read)
    else:
        raise ValueError(f"tensor {spec.stored_name} is not packed")
    return weight.rows(slice(spec.first_row, spec.first_row + spec.shape[0]))


def _unpack_integers(packing: PackedIntegers, spec: TensorSpec, read: Callable[[Part], Tensor]) -> GroupedWeight:
    num_outputs, num_inputs = spec.stored_shape
    parts = {role: read(part) for role, part in packing.parts(spec.stored_name, spec.stored_shape).items()}
    words, scales, stored_zeros = parts["numbers"], parts["scales"], parts.get("zeros")
    num_groups = packing.num_groups(num_inputs)
    places = _AWQ_PLACES if packing.layout == "awq" else range(packing.numbers_per_word)
    # Words hold numbers along the inputs, or along the outputs in AWQ; zero points are always along the outputs.
    if packing.layout == "rows":
        numbers = _unpack_words(words, packing.bits, places)[:, :num_inputs]
        zeros = None if stored_zeros is None else _unpack_words(stored_zeros.T, packing.bits, places).T[:num_outputs]
    else:
        along_inputs = packing.layout == "gptq"
        numbers = _unpack_words(words.T if along_inputs else words, packing.bits, places)
        numbers = numbers[:, :num_inputs] if along_inputs else numbers[:, :num_outputs].T
        zeros = None if stored_zeros is None else _unpack_words(stored_zeros, packing.bits, places).T[:num_outputs]
        scales = scales.T
    if zeros is None:
        zeros = torch.full((num_outputs, num_groups), 1 << (packing.bits - 1), dtype=torch.uint8)
    order = parts.get("group_of_input")
    if order is not None:
        order = order.long()
        if not bool(((order >= 0) & (order < num_groups)).all()):
            raise ValueError(f"tensor {spec.stored_name}: an input's group is not among the {num_groups}")
    group_inputs = packing.group_inputs or num_inputs
    if order is not None and torch.equal(order, torch.arange(num_inputs) // group_inputs):
        order = None
    return GroupedWeight(
        numbers=numbers.contiguous(),
        # int16 holds 256, the zero point of 8-bit numbers whose stored one is the largest byte and less by one.
        zeros=zeros.to(torch.int16).add_(packing.zero_offset),
        scales=scales.float().contiguous(),
        group_inputs=group_inputs,
        group_of_input=order,
        bits=packing.bits,
    )


def _unpack_words(words: Tensor, bits: int, places: "range | tuple[int, ...]") -> Tensor:
    """[R, W] int32 -> [R, W * len(places)] uint8: number i of a word is the one at ``places[i]``, from the low bits."""
    mask = (1 << bits) - 1
    unpacked = torch.empty((*words.shape, len(places)), dtype=torch.uint8)
    for number, place in enumerate(places):
        unpacked[..., number] = (words >> (place * bits)) & mask
    return unpacked.flatten(1)


def _unpack_scaled(packing: ScaledNumbers, spec: TensorSpec, read: Callable[[Part], Tensor]) -> GroupedWeight:
    num_outputs, num_inputs = spec.stored_shape
    parts = packing.parts(spec.stored_name, spec.stored_shape)
    numbers, scales = read(parts["numbers"]), read(parts["scales"]).float()
    if packing.block is not None:
        rows, group_inputs = packing.block
        scales = scales.repeat_interleave(rows, dim=0)[:num_outputs]
    else:
        scales, group_inputs = scales.reshape(-1, 1).expand(num_outputs, 1), num_inputs
    return GroupedWeight(numbers, None, scales.contiguous(), group_inputs)
