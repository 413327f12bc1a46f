"""How a quantized checkpoint stores the weight of a linear layer: as which tensors, of which shapes and types.

O outputs, I inputs, and G groups of neighbouring inputs that share a scale and a zero point. ``X`` is the layer's name.
"""

from typing import Literal, NamedTuple

Shape = tuple[int, ...]
Role = Literal["numbers", "scales", "zeros", "group_of_input"]

FLOATS = ("F64", "F32", "F16", "BF16")
"""The types of plain weights and of scales, by safetensors' names."""

_INT32_BITS = 32


class Part(NamedTuple):
    """One stored tensor of a packed weight. ``kinds``: the types that it may have, by safetensors' names."""

    name: str
    shape: Shape
    kinds: tuple[str, ...]


class PackedIntegers(NamedTuple):
    """``weight[o, i] = (numbers[o, i] - zeros[o, g]) * scales[o, g]``: unsigned integers of 4 or 8 bits in int32 words.

    ``layout`` names the parts and their dimensions. n numbers share a word; the first is in its lowest bits.

    ``awq``: ``X.qweight`` [I, O / 8], ``X.qzeros`` [G, O / 8] and ``X.scales`` [G, O]. A word holds outputs in the
    order 0, 2, 4, 6, 1, 3, 5, 7.
    ``gptq``: ``X.qweight`` [I / n, O], ``X.qzeros`` [G, O / n], ``X.scales`` [G, O] and ``X.g_idx`` [I].
    ``rows`` (compressed-tensors): ``X.weight_packed`` [O, I / n], ``X.weight_zero_point`` [O / n, G],
    ``X.weight_scale`` [O, G] and ``X.weight_g_idx`` [I].
    """

    layout: Literal["awq", "gptq", "rows"]
    bits: Literal[4, 8]
    group_inputs: int
    """0: all inputs are one group."""
    has_zeros: bool = True
    """Otherwise the zero point is half of the range."""
    zero_offset: int = 0
    """Added to each stored zero point; GPTQ's first format stores them less one."""
    has_order: bool = False
    """Whether ``group_of_input`` gives each input's group. Otherwise groups are in order."""

    @property
    def numbers_per_word(self) -> int:
        return _INT32_BITS // self.bits

    def num_groups(self, num_inputs: int) -> int:
        return -(-num_inputs // self.group_inputs) if self.group_inputs else 1

    def parts(self, stored_name: str, shape: Shape) -> dict[Role, Part]:
        """The stored tensors of the weight ``stored_name`` (``X.weight``) of ``shape`` [O, I]."""
        layer = stored_name.removesuffix(".weight")
        num_outputs, num_inputs = shape
        words = -(-num_outputs // self.numbers_per_word)
        groups = self.num_groups(num_inputs)
        numbers, zeros, scales, order = _PART_NAMES[self.layout]
        by_output = self.layout == "rows"
        if self.layout == "awq":
            numbers_shape: Shape = (num_inputs, words)
        else:
            input_words = -(-num_inputs // self.numbers_per_word)
            numbers_shape = (num_outputs, input_words) if by_output else (input_words, num_outputs)
        found: dict[Role, Part] = {
            "numbers": Part(f"{layer}.{numbers}", numbers_shape, ("I32",)),
            "scales": Part(f"{layer}.{scales}", (num_outputs, groups) if by_output else (groups, num_outputs), FLOATS),
        }
        if self.has_zeros:
            zeros_shape = (words, groups) if by_output else (groups, words)
            found["zeros"] = Part(f"{layer}.{zeros}", zeros_shape, ("I32",))
        if self.has_order:
            found["group_of_input"] = Part(f"{layer}.{order}", (num_inputs,), ("I32", "I64"))
        return found


_PART_NAMES = {
    "awq": ("qweight", "qzeros", "scales", ""),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "rows": ("weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx"),
}


class ScaledNumbers(NamedTuple):
    """``weight[o, i] = numbers[o, i] * scale``: FP8 (E4M3) or int8 numbers ``X.weight`` [O, I], and ``X.<scale_name>``.

    ``scale_shape``: [] or [1] for one scale, [O] or [O, 1] for one for each output, [O / rows, I / columns], rounded
    up, for one for each block of ``block`` = (rows, columns).
    """

    kind: Literal["F8_E4M3", "I8"]
    scale_name: str
    scale_shape: Shape
    block: tuple[int, int] | None = None

    @property
    def bits(self) -> int:
        """The width of a number."""
        return 8

    def parts(self, stored_name: str, shape: Shape) -> dict[Role, Part]:
        """The stored tensors of the weight ``stored_name`` of ``shape`` [O, I]."""
        layer = stored_name.removesuffix(".weight")
        return {
            "numbers": Part(stored_name, shape, (self.kind,)),
            "scales": Part(f"{layer}.{self.scale_name}", self._expected_scales(shape), FLOATS),
        }

    def _expected_scales(self, shape: Shape) -> Shape:
        if self.block is not None:
            return tuple(-(-size // step) for size, step in zip(shape, self.block, strict=True))
        known = ((), (1,), (1, 1), (shape[0],), (shape[0], 1))
        return self.scale_shape if self.scale_shape in known else (shape[0], 1)


Packing = PackedIntegers | ScaledNumbers
