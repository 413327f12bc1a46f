"""The weight of a linear layer as integers or FP8 numbers, with a scale for each group of inputs."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """``weight[o, i] = (numbers[o, i] - zeros[o, g]) * scales[o, g]``, where g is the group of input i.

    O outputs, I inputs, G groups. Input i is in group ``group_of_input[i]``, or without such a tensor in group
    ``i // group_inputs``.
    """

    numbers: Tensor  # [O, I] uint8, int8 or float8_e4m3fn
    zeros: Tensor | None  # [O, G] int16, for unsigned numbers alone
    scales: Tensor  # [O, G] float32
    group_inputs: int
    group_of_input: Tensor | None = None  # [I] int64
    bits: int = 8

    def rows(self, some: slice | Tensor) -> "GroupedWeight":
        """Some of the outputs, or all in another order."""
        zeros = None if self.zeros is None else self.zeros[some]
        return replace(self, numbers=self.numbers[some], zeros=zeros, scales=self.scales[some])

    def is_finite(self) -> bool:
        """Whether no scale and no number is NaN or infinite."""
        is_nan = self.numbers.dtype == torch.float8_e4m3fn and bool(
            (self.numbers.view(torch.uint8) & 0x7F == 0x7F).any()
        )
        return not is_nan and bool(self.scales.isfinite().all())

    def floats(self) -> Tensor:
        """[O, I] float32, each number rounded once."""
        weight = self.numbers.float()
        if self.group_of_input is None and weight.shape[1] % self.group_inputs == 0:
            groups = weight.view(len(weight), -1, self.group_inputs)
            if self.zeros is not None:
                groups.sub_(self.zeros.unsqueeze(-1))
            groups.mul_(self.scales.unsqueeze(-1))
            return weight
        order = self.group_of_input
        if order is None:
            order = torch.arange(weight.shape[1]) // self.group_inputs
        if self.zeros is not None:
            weight.sub_(self.zeros.index_select(1, order))
        return weight.mul_(self.scales.index_select(1, order))
