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
    # Words hold numbers along the inputs, or along the outputs in AWQ; zero points are always along the outputs.
    zeros = None
    if packing.layout == "rows":
        numbers = _unpack_words(words, packing.bits)[:, :num_inputs]
        if stored_zeros is not None:
            zeros = _unpack_words(stored_zeros.T, packing.bits).T
    elif packing.layout == "gptq":
        numbers = _unpack_words(words.T, packing.bits)[:, :num_inputs]
        zeros, scales = _unpack_words(parts["zeros"], packing.bits).T, scales.T
    else:
        numbers, zeros, scales = _unpack_awq(words)[:num_outputs], _unpack_awq(parts["zeros"]), scales.T
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
        zeros=zeros[:num_outputs].to(torch.int16).add_(packing.zero_offset),
        scales=scales.float().contiguous(),
        group_inputs=group_inputs,
        group_of_input=order,
        bits=packing.bits,
    )


def _unpack_words(words: Tensor, bits: int) -> Tensor:
    """[R, W] int32 -> [R, W * 32 / bits] uint8: a word's numbers from its low bits on."""
    bytes_of_rows = words.contiguous().view(torch.uint8)
    if bits == 8:
        return bytes_of_rows
    halves = torch.empty((*bytes_of_rows.shape, 2), dtype=torch.uint8)
    torch.bitwise_and(bytes_of_rows, 0x0F, out=halves[..., 0])
    torch.bitwise_right_shift(bytes_of_rows, 4, out=halves[..., 1])
    return halves.flatten(1)


def _unpack_awq(words: Tensor) -> Tensor:
    """[R, W] int32 -> [W * 8, R] uint8."""
    by_byte = words.T.contiguous().view(torch.uint8).view(words.shape[1], -1, 4)  # [W, R, 4]
    numbers = torch.empty((words.shape[1], 8, words.shape[0]), dtype=torch.uint8)
    for number, place in enumerate(_AWQ_PLACES):
        byte = by_byte[..., place // 2]
        if place % 2:
            torch.bitwise_right_shift(byte, 4, out=numbers[:, number])
        else:
            torch.bitwise_and(byte, 0x0F, out=numbers[:, number])
    return numbers.flatten(0, 1)


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
