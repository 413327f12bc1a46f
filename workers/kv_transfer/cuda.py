"""Blocks in a GPU's memory, and reading another process's blocks on the same host by CUDA's inter-process handles.

Copies go through staging buffers, on streams of their own. The GPU gathers blocks, so that few long copies cross the
bus. A copy need not wait for the stream that computes, because no step touches these blocks meanwhile.
"""

import base64
import binascii
import json
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workers.kv.pools import Bytes
from workers.kv.staged_copier import StagedCopier
from workers.kv_transfer.errors import TransferError

_STAGING_BYTES = 8 * 2**20


class CudaBlocks:
    """Implements ``BlockMemory`` for a pool on a GPU; ``blocks`` is [num_blocks, pieces, bytes of a piece]."""

    def __init__(self, blocks: Tensor) -> None:
        self.blocks = blocks
        self._reading, self._writing = _Staging(blocks), _Staging(blocks)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    def read(self, blocks: Sequence[int], out: Bytes) -> None:
        self._reading.read(blocks, out)

    def write(self, blocks: Sequence[int], source: Bytes, source_blocks: Sequence[int]) -> None:
        self._writing.write(blocks, source, source_blocks)

    def write_from_device(self, blocks: Sequence[int], source: Tensor, source_blocks: Sequence[int]) -> None:
        """Like ``write``, from memory that this GPU can read."""
        self._writing.write_from_device(blocks, source, source_blocks)


class _Staging:
    """A buffer on the GPU, a pinned buffer on the host and a stream, for one copy at a time."""

    def __init__(self, blocks: Tensor) -> None:
        num_staged = max(1, min(len(blocks), _STAGING_BYTES // (blocks.shape[1] * blocks.shape[2])))
        self._pinned = torch.empty((num_staged, *blocks.shape[1:]), dtype=torch.uint8, pin_memory=True)
        self._on_host: Bytes = self._pinned.numpy()
        self._device = blocks
        self._copier = StagedCopier(blocks, self._pinned, _STAGING_BYTES)
        self._stream = torch.cuda.Stream(blocks.device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()

    def read(self, blocks: Sequence[int], out: Bytes) -> None:
        most = len(self._on_host)
        with self._lock:
            for first in range(0, len(blocks), most):
                part = blocks[first : first + most]
                with torch.cuda.stream(self._stream):
                    self._copier.copy(part, range(len(part)), out=True)
                self._finish()
                out[first : first + len(part)] = self._on_host[: len(part)]

    def write(self, blocks: Sequence[int], source: Bytes, source_blocks: Sequence[int]) -> None:
        most = len(self._on_host)
        with self._lock:
            for first in range(0, len(blocks), most):
                part = blocks[first : first + most]
                for at, block in enumerate(source_blocks[first : first + most]):
                    self._on_host[at] = source[block]
                with torch.cuda.stream(self._stream):
                    self._copier.copy(part, range(len(part)), out=False)
                self._finish()

    @torch.inference_mode()
    def write_from_device(self, blocks: Sequence[int], source: Tensor, source_blocks: Sequence[int]) -> None:
        most = len(self._on_host)
        with self._lock:
            for first in range(0, len(blocks), most):
                with torch.cuda.stream(self._stream):
                    here = torch.tensor(blocks[first : first + most], device=self._device.device)
                    there = torch.tensor(source_blocks[first : first + most], device=self._device.device)
                    self._device.index_copy_(0, here, source.index_select(0, there))
                self._finish()

    def _finish(self) -> None:
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record(self._stream)
        copied.synchronize()


def export_memory(pool: Tensor) -> str:
    """The name by which another process can ``open_memory``. ``pool`` is contiguous and lives as long as this process.

    The handle names the whole allocation that torch made at the driver, and the pool's place in it.
    """
    storage = pool.view(torch.uint8).untyped_storage()
    # The fields that torch.multiprocessing sends.
    fields = storage._share_cuda_()  # type: ignore[no-untyped-call]
    shown = [base64.b64encode(field).decode() if isinstance(field, bytes) else field for field in fields[1:]]
    return json.dumps({"fields": shown, "offset": pool.storage_offset() * pool.itemsize})


def open_memory(shown: str, num_blocks: int, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Another process's pool as [num_blocks, pieces, bytes of a piece], readable by ``device``.

    Raises: TransferError if the GPU cannot reach the memory, or its size differs.
    """
    pieces, piece_bytes = shape
    try:
        entry = json.loads(shown)
        fields = [_field(value) for value in entry["fields"]]
        storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *fields)
        flat = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        flat = flat[int(entry["offset"]) :][: num_blocks * pieces * piece_bytes]
        return flat.view(pieces, num_blocks, piece_bytes).transpose(0, 1)
    except (ValueError, KeyError, TypeError, binascii.Error, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise TransferError(f"cannot open the KV pool on another GPU: {reason[:200]}") from None


def _field(value: Any) -> Any:
    return base64.b64decode(value, validate=True) if isinstance(value, str) else value
