"""Where weights come from: safetensors files (plain or quantized), a GGUF file, or a random generator."""

import math
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from safetensors import SafetensorError, safe_open
from torch import Tensor

from actorserve.errors import ModelError
from actorserve.model_files.description import TensorSpec
from actorserve.model_files.gguf_reader import GgufTensor, read_gguf
from actorserve.model_files.gguf_tensors import TYPES
from actorserve.model_files.packing import Part
from workers.kernels.grouped_weight import GroupedWeight
from workers.weights.packed import unpack

_FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_DEQUANTIZED_BYTES = 2**16  # dequantized at a time, so that temporaries stay in the cache
_RANDOM_NUMBERS = 2**20 + 1  # an odd number, so that the rows of a weight are not all alike


class WeightSource(Protocol):
    def read(self, spec: TensorSpec) -> Tensor | GroupedWeight:
        """The part of a stored tensor that ``spec`` names, on the CPU, in the file's type (GGUF's as floats).

        A packed weight of a quantized checkpoint is a GroupedWeight. The caller applies ``head_rows`` and ``addend``.

        Raises: ModelError, in one line that names file and tensor.
        """
        ...


class SafetensorsSource:
    """One or several safetensors files, mapped into memory."""

    def __init__(self, files: Iterable[Path], stack: ExitStack) -> None:
        """The files stay open as long as ``stack``. Raises: ModelError."""
        self._places: dict[str, tuple[Path, Any]] = {}
        for file in files:
            try:
                opened = stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"cannot read {file}: {error}") from None
            self._places |= dict.fromkeys(opened.keys(), (file, opened))

    def read(self, spec: TensorSpec) -> Tensor | GroupedWeight:
        if spec.packing is not None:
            try:
                return unpack(spec, self._read)
            except ValueError as error:
                file, _ = self._places[spec.parts[0].name]
                raise ModelError(f"{file}: {error}") from None
        rows = slice(spec.first_row, spec.first_row + spec.shape[0])
        index = rows if spec.expert is None else (spec.expert, rows)
        return self._read(Part(spec.stored_name, spec.stored_shape, ()), index)

    def _read(self, part: Part, index: Any = ...) -> Tensor:
        name = part.name
        if name not in self._places:
            raise ModelError(f"tensor {name} is missing")
        file, opened = self._places[name]
        try:
            stored = opened.get_slice(name)
            _check_shape(name, tuple(stored.get_shape()), part.shape, file)
            tensor: Tensor = stored[index]
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read tensor {name} from {file}: {error}") from None
        return tensor


class GgufSource:
    """A GGUF file; quantized tensors are dequantized to float32."""

    def __init__(self, file: Path, stack: ExitStack) -> None:
        """Raises: ModelError."""
        self._file = file
        self._tensors = read_gguf(file).tensors
        self._threads = stack.enter_context(ThreadPoolExecutor(torch.get_num_threads()))

    def read(self, spec: TensorSpec) -> Tensor:
        entry = self._tensors.get(spec.stored_name)
        if entry is None:
            raise ModelError(f"{self._file}: tensor {spec.stored_name} is missing")
        _check_shape(spec.stored_name, entry.shape, spec.stored_shape, self._file)
        if entry.type not in TYPES or (len(entry.shape) == 1 and entry.type not in _FLOATS):
            raise ModelError(f"{self._file}: tensor {entry.name} has type {entry.type.name}, which is not supported")
        raw = self._bytes(entry, spec)
        if entry.type in _FLOATS:
            return torch.from_numpy(raw).view(_FLOATS[entry.type]).view(spec.shape)
        return torch.from_numpy(self._dequantized(raw, entry.type)).view(spec.shape)

    def _bytes(self, entry: GgufTensor, spec: TensorSpec) -> np.ndarray:
        """The bytes of the rows of ``spec``; a row is a whole number of blocks."""
        num_rows = math.prod(entry.shape[:-1]) if len(entry.shape) > 1 else entry.shape[0]
        bytes_per_row = entry.num_bytes // num_rows
        rows_per_expert = num_rows if spec.expert is None else num_rows // entry.shape[0]
        first_row = (spec.expert or 0) * rows_per_expert + spec.first_row
        num_bytes = spec.shape[0] * bytes_per_row
        try:
            raw = np.fromfile(self._file, np.uint8, num_bytes, offset=entry.offset + first_row * bytes_per_row)
        except OSError as error:
            raise ModelError(f"cannot read {self._file}: {error.strerror}") from None
        if len(raw) < num_bytes:
            raise ModelError(f"{self._file}: truncated within tensor {entry.name}")
        return raw

    def _dequantized(self, raw: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
        """A tensor's blocks as float32 numbers, in order.

        Blocks are independent of rows, so the package gets as many at a time as is fast. It computes in numpy, which
        starts no threads.
        """
        numbers_per_block, bytes_per_block = GGML_QUANT_SIZES[kind]
        step = max(1, _DEQUANTIZED_BYTES // bytes_per_block)
        blocks = raw.reshape(-1, bytes_per_block)
        numbers = np.empty((len(blocks), numbers_per_block), np.float32)

        def fill(start: int) -> None:
            part = blocks[start : start + step].reshape(-1)
            with np.errstate(invalid="ignore", over="ignore"):  # the caller finds damaged scales by their results
                numbers[start : start + step] = dequantize(part, kind).reshape(-1, numbers_per_block)

        for _ in self._threads.map(fill, range(0, len(blocks), step)):
            pass
        return numbers


class DummySource:
    """Random weights for a model of any shape, the same every time, for measurements without a model's file.

    Gains are near one, biases near zero, and a linear layer keeps the magnitude of its input.
    """

    def __init__(self) -> None:
        self._numbers = torch.randn(_RANDOM_NUMBERS, generator=torch.Generator().manual_seed(0))

    def read(self, spec: TensorSpec) -> Tensor:
        numbers = self._random(spec).view(spec.shape)
        if len(spec.shape) > 1:
            return numbers.mul_(spec.shape[-1] ** -0.5)
        is_gain = spec.name.endswith("norm.weight")
        return numbers.mul_(0.02).add_(1.0 - spec.addend if is_gain else 0.0)

    def _random(self, spec: TensorSpec) -> Tensor:
        """A slice of shared random numbers that begins where the name says: drawing takes ten times as long."""
        numbers = torch.empty(math.prod(spec.shape))
        first, place = 0, zlib.crc32(spec.name.encode()) % _RANDOM_NUMBERS
        while first < len(numbers):
            part = self._numbers[place : place + len(numbers) - first]
            numbers[first : first + len(part)] = part
            first, place = first + len(part), 0
        return numbers


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...], file: Path) -> None:
    if found != expected:
        raise ModelError(f"{file}: tensor {name} has shape {found}, not {expected}")
