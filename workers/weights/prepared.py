"""Weights in the form that the engine computes with, kept in a file that the next start maps without computing.

Quantizing a model takes longer than everything else at start, and gives the same bits each time. So the first start
keeps the result, and later starts map the file; all workers of a host then share one copy in memory. The file's name is
a digest of its origin: the weight files' paths, sizes and times, the numeric mode, the code that prepares, and the
CPU's instruction set. Nothing depends on the file: if it cannot be kept or is damaged, weights are prepared again.
"""

import fcntl
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from actorserve.local_trust import check_file, open_lock, trusted_folder
from actorserve.model_files.default_model import cache_folder
from actorserve.model_files.description import ModelDescription

_log = logging.getLogger(__name__)

_MAGIC = b"actorserve weights 1\n"
_FOOTER_BYTES = 16  # the index's offset and length
_ALIGNMENT = 64
_UNUSED_DAYS = 30
_CODE = (
    "weights/*.py",
    "kernels/grouped_weight.py",
    "kernels/numerics.py",
    "kernels/quantized_linear.py",
    "models/*.py",
)
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int8)}


def prepared_file(description: ModelDescription, mode: str) -> Path:
    """Where the prepared weights of this model and numeric mode are kept.

    Raises: OSError if a weight file cannot be found.
    """
    # int4 chooses each group's scale by sums of errors, whose order in torch depends on the instruction set.
    code = (torch.__version__, torch.backends.cpu.get_cpu_capability())
    made_of = (mode, description.config, description.format, description.tensors, code)
    hashed = hashlib.sha256(repr(made_of).encode())
    for pattern in _CODE:
        for file in sorted(Path(__file__).parents[1].glob(pattern)):
            hashed.update(file.read_bytes())
    for file in description.weight_files:
        facts = file.stat()
        hashed.update(f"{file.resolve()} {facts.st_size} {facts.st_mtime_ns} {facts.st_ino}".encode())
    return cache_folder() / "prepared" / f"{hashed.hexdigest()[:32]}.weights"


class PreparedWeights:
    """A mapped file of tensors; ``facts`` is the value that its writer stored with them."""

    def __init__(self, file: Path) -> None:
        """Raises: OSError if the file cannot be read; ValueError if it is damaged; UntrustedError if others could have
        written it.
        """
        trusted_folder(file.parent)
        check_file(file)
        size = file.stat().st_size
        with file.open("rb") as opened:
            if opened.read(len(_MAGIC)) != _MAGIC or size < len(_MAGIC) + _FOOTER_BYTES:
                raise ValueError("not a file of prepared weights")
            opened.seek(size - _FOOTER_BYTES)
            place, length = (int.from_bytes(opened.read(8), "little") for _ in range(2))
            if place + length + _FOOTER_BYTES != size:
                raise ValueError("truncated")
            opened.seek(place)
            index: dict[str, Any] = json.loads(opened.read(length))
        try:
            self.facts: dict[str, Any] = index["facts"]
            self._entries: dict[str, list[Any]] = index["tensors"]
            self._bytes = torch.from_file(str(file), shared=False, size=place, dtype=torch.uint8)
        except KeyError as error:
            raise ValueError(f"{error} is missing") from None
        except RuntimeError as error:
            raise ValueError(f"the file cannot be mapped: {error}") from None
        with suppress(OSError):  # as in a read-only cache
            os.utime(file)  # the time of last use, by which old files are removed

    def get(self, name: str) -> Tensor | None:
        """The tensor called ``name``, or None. It must not be written to."""
        if name not in self._entries:
            return None
        start, dtype, shape = self._entries[name]
        num_bytes = torch.Size(shape).numel() * _DTYPES[dtype].itemsize
        return self._bytes[start : start + num_bytes].view(_DTYPES[dtype]).view(shape)


class PreparedWriter:
    """Writes tensors one by one. The file appears whole when `finish` is called, or not at all."""

    def __init__(self, file: Path) -> None:
        """Raises: OSError."""
        self._file = file
        descriptor, self._partial = tempfile.mkstemp(dir=file.parent, prefix="partial-")
        self._opened = os.fdopen(descriptor, "wb")
        self._opened.write(_MAGIC)
        self._entries: dict[str, list[Any]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Raises: OSError, for example if the disk is full."""
        self._opened.write(bytes(-self._opened.tell() % _ALIGNMENT))
        self._entries[name] = [self._opened.tell(), str(tensor.dtype), list(tensor.shape)]
        self._opened.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)

    def finish(self, facts: dict[str, Any]) -> None:
        """Raises: OSError."""
        place = self._opened.tell()
        index = json.dumps({"facts": facts, "tensors": self._entries}).encode()
        self._opened.write(index + place.to_bytes(8, "little") + len(index).to_bytes(8, "little"))
        self._opened.flush()
        os.fsync(self._opened.fileno())
        os.replace(self._partial, self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(OSError):  # an incomplete file is removed anyway
            self._opened.close()
        with suppress(FileNotFoundError):
            os.unlink(self._partial)


@contextmanager
def exclusive(folder: Path) -> Iterator[bool]:
    """Whether no other process is preparing weights now; if so, none can begin within the context.

    Raises: OSError if the folder cannot be created or written to; UntrustedError if others may write to it.
    """
    trusted_folder(folder)
    with open_lock(folder / "writing.lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        _remove_unused(folder)
        yield True


def _remove_unused(folder: Path) -> None:
    """Remove files that a killed process left half-written, and files that no start used for a month."""
    oldest = time.time() - _UNUSED_DAYS * 24 * 3600
    for file in folder.iterdir():
        if file.name.startswith("partial-") or (file.suffix == ".weights" and file.stat().st_mtime < oldest):
            _log.info("removing %s", file)
            file.unlink(missing_ok=True)
