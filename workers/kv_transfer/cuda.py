"""Blocks in a GPU's memory, and reading another process's blocks on the same host by CUDA's inter-process handles.

Copies go through staging buffers, on streams of their own. The GPU gathers blocks, so that few long copies cross the
bus. A copy need not wait for the stream that computes, because no step touches these blocks meanwhile.
"""

import base64
import binascii
import json
import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workers.kv.pools import ALL_PIECES, Bytes
from workers.kv.staged_copier import StagedCopier, front
from workers.kv_transfer.errors import DirectCopyError

_log = logging.getLogger(__name__)

_STAGING_BYTES = 8 * 2**20


class CudaBlocks:
    """Implements ``BlockMemory`` for a pool on a GPU; ``blocks`` is [num_blocks, pieces, bytes of a piece]."""

    def __init__(self, blocks: Tensor) -> None:
        self.blocks = blocks
        self._reading, self._writing = _Staging(blocks), _Staging(blocks)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    def read(self, blocks: Sequence[int], out: Bytes, pieces: slice = ALL_PIECES) -> None:
        self._reading.read(blocks, out, pieces)

    def write(
        self, blocks: Sequence[int], source: Bytes, source_blocks: Sequence[int], pieces: slice = ALL_PIECES
    ) -> None:
        self._writing.write(blocks, source, source_blocks, pieces)

    def export(self) -> str:
        """The name by which another process on this host can ``open_peer`` this pool; empty if CUDA cannot share it.

        The handle names the whole allocation that torch made at the driver, and the pool's place in it. The pool must
        live as long as this process.
        """
        storage = self.blocks.untyped_storage()
        try:
            # The fields that torch.multiprocessing sends.
            fields = storage._share_cuda_()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            _log.warning(
                "CUDA cannot share this GPU's KV cache with other processes, so other workers on this host read it by "
                "sockets, which takes longer: %s",
                _first_line(error),
            )
            return ""
        shown = [base64.b64encode(field).decode() if isinstance(field, bytes) else field for field in fields[1:]]
        return json.dumps({"fields": shown, "offset": self.blocks.storage_offset()})

    def open_peer(self, shown: str, num_blocks: int) -> Tensor:
        """Another process's pool as [num_blocks, pieces, bytes of a piece], readable by this pool's GPU.

        Raises: DirectCopyError if the GPU cannot reach the memory, or its size differs.
        """
        _, pieces, piece_bytes = self.blocks.shape
        device = self.blocks.device
        try:
            entry = json.loads(shown)
            fields = [_field(value) for value in entry["fields"]]
            storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *fields)
            flat = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
            flat = flat[int(entry["offset"]) :][: num_blocks * pieces * piece_bytes]
            return flat.view(pieces, num_blocks, piece_bytes).transpose(0, 1)
        except (ValueError, KeyError, TypeError, binascii.Error, RuntimeError) as error:
            raise DirectCopyError(f"cannot open the KV pool on another GPU: {_first_line(error)}") from None

    def write_from_peer(
        self, blocks: Sequence[int], source: Tensor, source_blocks: Sequence[int], pieces: slice = ALL_PIECES
    ) -> None:
        """Like ``write``, from what ``open_peer`` returned.

        Raises: DirectCopyError if CUDA cannot copy.
        """
        try:
            self._writing.write_from_device(blocks, source, source_blocks, pieces)
        except RuntimeError as error:
            raise DirectCopyError(f"cannot copy from the KV pool on another GPU: {_first_line(error)}") from None


class _Staging:
    """A buffer on the GPU, a pinned buffer on the host and a stream, for one copy at a time."""

    def __init__(self, blocks: Tensor) -> None:
        num_staged = max(1, min(len(blocks), _STAGING_BYTES // (blocks.shape[1] * blocks.shape[2])))
        self._pinned = torch.empty((num_staged, *blocks.shape[1:]), dtype=torch.uint8, pin_memory=True)
        self._device = blocks
        self._copier = StagedCopier(blocks, self._pinned, _STAGING_BYTES)
        self._stream = torch.cuda.Stream(blocks.device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()

    def read(self, blocks: Sequence[int], out: Bytes, pieces: slice) -> None:
        most, (copier, on_host) = len(self._pinned), self._view(pieces)
        with self._lock:
            for first in range(0, len(blocks), most):
                part = blocks[first : first + most]
                with torch.cuda.stream(self._stream):
                    copier.copy(part, range(len(part)), out=True)
                self._finish()
                out[first : first + len(part)] = on_host[: len(part)]

    def write(self, blocks: Sequence[int], source: Bytes, source_blocks: Sequence[int], pieces: slice) -> None:
        most, (copier, on_host) = len(self._pinned), self._view(pieces)
        with self._lock:
            for first in range(0, len(blocks), most):
                part = blocks[first : first + most]
                for at, block in enumerate(source_blocks[first : first + most]):
                    on_host[at] = source[block]
                with torch.cuda.stream(self._stream):
                    copier.copy(part, range(len(part)), out=False)
                self._finish()

    def _view(self, pieces: slice) -> tuple[StagedCopier, Bytes]:
        """What copies these pieces of blocks, and where on the host they lie then."""
        shape = self._device[:, pieces].shape[1:]
        return self._copier.of_pieces(pieces), front(self._pinned, *shape).numpy()

    @torch.inference_mode()
    def write_from_device(
        self, blocks: Sequence[int], source: Tensor, source_blocks: Sequence[int], pieces: slice
    ) -> None:
        most = len(self._pinned)
        with self._lock:
            for first in range(0, len(blocks), most):
                with torch.cuda.stream(self._stream):
                    here = torch.tensor(blocks[first : first + most], device=self._device.device)
                    there = torch.tensor(source_blocks[first : first + most], device=self._device.device)
                    self._device[:, pieces].index_copy_(0, here, source.index_select(0, there))
                self._finish()

    def _finish(self) -> None:
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record(self._stream)
        copied.synchronize()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _field(value: Any) -> Any:
    return base64.b64decode(value, validate=True) if isinstance(value, str) else value
