"""A decoder's weights by name: checked, fused, and in the engine's form.

``actorserve.model_files`` compared the tensors' names and shapes with the files' headers. Each tensor is checked again
here when it is read, because the file may have changed since.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor

from actorserve.errors import ModelError
from actorserve.model_files.description import ModelDescription, TensorSpec
from workers.kernels.choose import Kernels
from workers.kernels.grouped_weight import GroupedWeight
from workers.kernels.linear import Linear
from workers.kernels.quantized_linear import QuantizedLinear, quantize
from workers.kernels.triton.grouped import CompactLinear, StackedWeight, pack, stack
from workers.weights.sources import WeightSource
from workers.weights.store import WeightStore


class Norm(Protocol):
    """[..., D] -> [..., D]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class RmsNorm(Protocol):
    """[..., D] -> [..., D]; ``residual``, of the result's shape, is added last."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor: ...


ReadLinear = Callable[[], tuple[Tensor, Tensor | None]]
"""Reads a weight, [out_features, in_features], and a bias, [out_features], in the dtype between the layers."""

Progress = Callable[[float], None]
"""Called with the share of the work that is done, 0 to 1."""


class Weights:
    """The weights that a decoder is built from.

    Every method raises ModelError, in one line that names the tensor, if a tensor is missing, has a wrong shape, or
    holds a number that is not a finite float.
    """

    def __init__(
        self,
        description: ModelDescription,
        open_source: Callable[[], WeightSource],
        store: WeightStore,
        kernels: Kernels,
        progress: Progress,
    ) -> None:
        self.config = description.config
        self.dtype = kernels.numerics.activations
        self.device = kernels.device
        self.row_ops = kernels.row_ops
        self.runs_grouped = kernels.runs_grouped
        self.path = description.path
        self._specs = {spec.name: spec for spec in description.tensors}
        self._open_source = cache(open_source)  # not opened if an earlier start kept all weights
        self._store = store
        self._kernels = kernels
        self._progress = progress
        self._read_names: set[str] = set()

    def linear(self, *names: str) -> Linear:
        """The linear layers of these names as one layer, their outputs one after another, with biases if there are."""
        return self._linear(names, self._kernels.numerics.weight_bits)

    def matrix(self, name: str) -> Tensor:
        """A weight in float32 in every numeric mode."""
        return self._tensor(f"{name}.weight", torch.float32)

    def table(self, name: str) -> Tensor:
        """A table of rows, such as the tokens' embeddings."""
        return self._tensor(f"{name}.weight", self._kernels.numerics.embedding)

    def embedding_and_output(self, embedding: str, output: str) -> tuple[Tensor, Linear]:
        """The tokens' table, and the layer that makes logits; the layer shares the table's numbers if they are tied."""
        table, bits = self.table(embedding), self._kernels.numerics.head_bits
        if not self.config.tie_word_embeddings:
            return table, self._linear((output,), bits)
        return table, self._make_linear(output, [embedding], lambda: (table.to(self.dtype), None), bits)

    def gain(self, name: str) -> Tensor:
        """The weight of a norm, in the dtype between the layers."""
        return self._tensor(f"{name}.weight", self.dtype)

    def rms_norm(self, name: str) -> RmsNorm:
        return partial(self.row_ops.rms_norm, weight=self.gain(name), eps=self.config.norm_eps)

    def layer_norm(self, name: str) -> Norm:
        weight, bias = (self._tensor(f"{name}.{part}", self.dtype) for part in ("weight", "bias"))
        return partial(self.row_ops.layer_norm, weight=weight, bias=bias, eps=self.config.norm_eps)

    def stacked(self, experts: Sequence[Sequence[str]]) -> StackedWeight:
        """For experts on a GPU: each one's linear layers as one layer, without biases, and all experts in one stack."""
        packed = [self._packed(names) for names in experts]
        found = stack([weight for weight in packed if weight is not None])
        if found is not None and found.num_experts == len(experts):
            return found
        del packed
        numbers: Tensor | None = None
        for number, names in enumerate(experts):
            weight = _joined([self._read(f"{name}.weight", self.dtype) for name in names])
            if numbers is None:
                numbers = weight.new_empty((len(experts), *weight.shape))
            numbers[number] = weight
        assert numbers is not None, "there are no experts"
        return StackedWeight("plain", numbers, numbers.shape[2])

    def _linear(self, names: tuple[str, ...], bits: int | None) -> Linear:
        packed = self._packed(names) if bits is None else None
        if packed is not None:
            return CompactLinear(packed, self._bias(names), self.dtype)

        def read() -> tuple[Tensor, Tensor | None]:
            return _joined([self._read(f"{name}.weight", self.dtype) for name in names]), self._bias(names)

        return self._make_linear("+".join(names), names, read, bits)

    def _make_linear(self, name: str, names: Sequence[str], read: ReadLinear, bits: int | None) -> Linear:
        """The layer that is kept under ``name`` and made of the weights ``names``."""
        if bits is None:
            return self._kernels.float_linear(*read())
        try:
            return QuantizedLinear(self._store.quantized(name, lambda: quantize(*read(), bits)))
        except ValueError as error:
            stored = ", ".join(self._specs[f"{name}.weight"].stored_name for name in names)
            raise ModelError(f"{self.path}: tensor {stored} cannot be held in {bits} bits: {error}") from None

    def _tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._store.tensor(name, lambda: self._read(name, dtype))

    def _bias(self, names: Sequence[str]) -> Tensor | None:
        biases = [self._read(f"{name}.bias", self.dtype) for name in names if f"{name}.bias" in self._specs]
        return _joined(biases) if biases else None

    def _packed(self, names: Sequence[str]) -> StackedWeight | None:
        """The linear layers of these names as one layer of packed numbers, if the kernel takes all of them."""
        specs = [self._specs[f"{name}.weight"] for name in names]
        if not self.runs_grouped or any(spec.packing is None for spec in specs):
            return None
        weights = []
        for spec in specs:
            weight = self._open_source().read(spec)
            assert isinstance(weight, GroupedWeight), "a packed tensor is read as its numbers and scales"
            if not weight.is_finite():
                raise ModelError(f"{self.path}: tensor {spec.stored_name} holds NaN or infinity")
            if spec.head_rows:
                heads = torch.arange(spec.shape[0]).view(-1, len(spec.head_rows))
                weight = weight.rows(heads[:, list(spec.head_rows)].flatten())
            weights.append(weight)
            self._count(spec)
        return pack(weights, self.device)

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        spec = self._specs[name]
        stored = self._open_source().read(spec)
        tensor = stored.floats() if isinstance(stored, GroupedWeight) else stored
        if not tensor.is_floating_point():
            raise ModelError(f"{self.path}: tensor {spec.stored_name} holds {tensor.dtype}, not floats")
        least, greatest = tensor.aminmax()  # NaN if a number is NaN; the quickest of torch's passes over a tensor
        if not (least.isfinite() and greatest.isfinite()):
            raise ModelError(f"{self.path}: tensor {spec.stored_name} holds NaN or infinity")
        if spec.head_rows:
            heads = tensor.view(-1, len(spec.head_rows), *tensor.shape[1:])
            tensor = heads[:, list(spec.head_rows)].view(tensor.shape)
        if spec.addend:
            tensor = tensor.float() + spec.addend
        self._count(spec)
        return tensor.to(self.device, dtype)

    def _count(self, spec: TensorSpec) -> None:
        self._read_names.add(spec.name)
        self._progress(len(self._read_names) / len(self._specs))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
