"""Where ready weights come from: made from the model's files, or mapped from the file that an earlier start kept."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from actorserve.errors import ModelError
from actorserve.model_files.description import ModelDescription
from workers.kernels.numerics import Numerics
from workers.kernels.quantized_linear import QuantizedWeight
from workers.weights.file_digest import weights_digest
from workers.weights.prepared import PreparedWeights, PreparedWriter, exclusive, prepared_file

_log = logging.getLogger(__name__)

_TENSORS = ("packed", "group_scales", "column_scales", "column_sums", "bias")
_NUMBERS = ("in_features", "out_features", "bits")


class WeightStore(Protocol):
    """Returns the result of ``make``, or an equal one that an earlier start kept under the same name."""

    @property
    def digest(self) -> str:
        """Digest of the model's weight files, for the worker's kind. Raises: ModelError if one cannot be read."""
        ...

    def tensor(self, name: str, make: Callable[[], Tensor]) -> Tensor: ...

    def quantized(self, name: str, make: Callable[[], QuantizedWeight]) -> QuantizedWeight: ...


class FromFiles:
    """Makes every weight, and keeps none."""

    def __init__(self, description: ModelDescription) -> None:
        self.digest = weights_digest(description)

    def tensor(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        return make()

    def quantized(self, name: str, make: Callable[[], QuantizedWeight]) -> QuantizedWeight:
        return make()


class Recording(FromFiles):
    """Makes every weight, and writes it to a file; after a failed write it keeps nothing."""

    def __init__(self, description: ModelDescription, writer: PreparedWriter) -> None:
        super().__init__(description)
        self._writer: PreparedWriter | None = writer
        self._numbers: dict[str, dict[str, int]] = {}

    def tensor(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        tensor = make()
        self._add(name, tensor)
        return tensor

    def quantized(self, name: str, make: Callable[[], QuantizedWeight]) -> QuantizedWeight:
        weight = make()
        for part in _TENSORS:
            tensor: Tensor | None = getattr(weight, part)
            if tensor is not None:
                self._add(f"{name}.{part}", tensor)
        self._numbers[name] = {number: getattr(weight, number) for number in _NUMBERS}
        return weight

    def finish(self) -> None:
        if self._writer is not None:
            try:
                self._writer.finish({"digest": self.digest, "quantized": self._numbers})
            except OSError as error:
                self._give_up(error)

    def _add(self, name: str, tensor: Tensor) -> None:
        if self._writer is not None:
            try:
                self._writer.add(name, tensor)
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._writer = None
        _log.warning("the next start prepares the weights again, because they cannot be kept: %s", error.strerror)


class Kept:
    """Maps the weights that an earlier start kept."""

    def __init__(self, prepared: PreparedWeights) -> None:
        """Raises: ValueError if the file does not hold weights of this form."""
        self._prepared = prepared
        try:
            self.digest = str(prepared.facts["digest"])
            self._numbers: dict[str, dict[str, Any]] = prepared.facts["quantized"]
        except KeyError as error:
            raise ValueError(f"{error} is missing") from None

    def tensor(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        tensor = self._prepared.get(name)
        return make() if tensor is None else tensor

    def quantized(self, name: str, make: Callable[[], QuantizedWeight]) -> QuantizedWeight:
        if name not in self._numbers:
            return make()
        tensors = {part: self._prepared.get(f"{name}.{part}") for part in _TENSORS}
        return QuantizedWeight(**tensors, **self._numbers[name])  # type: ignore[arg-type]


@contextmanager
def open_store(description: ModelDescription, numerics: Numerics, device: torch.device) -> Iterator[WeightStore]:
    """The store for a model. Only integer weights are kept, because floats are read fast and packed by torch itself.

    Raises: ModelError if a weight file cannot be read.
    """
    if numerics.weight_bits is None or not description.weight_files:
        yield FromFiles(description)
        return
    try:
        file = prepared_file(description, numerics.name)
    except OSError as error:
        raise ModelError(f"cannot read {error.filename}: {error.strerror}") from None
    try:
        kept = Kept(PreparedWeights(file))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        _log.warning("preparing the weights again, because %s cannot be used: %s", file, error)
    else:
        yield kept
        return
    with ExitStack() as stack:
        try:
            mine = stack.enter_context(exclusive(file.parent))
            writer = stack.enter_context(PreparedWriter(file)) if mine else None
        except OSError as error:
            _log.warning("the next start prepares the weights again, because they cannot be kept: %s", error)
            writer = None
        if writer is None:
            yield FromFiles(description)
            return
        recording = Recording(description, writer)
        yield recording
        recording.finish()
