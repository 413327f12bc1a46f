"""Copies of blocks between a GPU and the host through a buffer on the GPU, so that few long copies cross the bus."""

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class StagedCopier:
    """Copies between ``device`` and ``host``, both [num_blocks, pieces, bytes], through a buffer on the device.

    It only issues copies, on the current stream. The buffer takes at most ``staging_bytes``, but at least one block.
    No copy crosses the border between two chunks of ``blocks_per_chunk`` blocks of ``host``; None: one chunk.
    """

    def __init__(self, device: Tensor, host: Tensor, staging_bytes: int, blocks_per_chunk: int | None = None) -> None:
        self._blocks_per_chunk = blocks_per_chunk or max(1, len(host))
        word = next(word for word in _WORDS if device.shape[2] % word.itemsize == 0)
        self._device, self._host = device.view(word), host.view(word)
        block_bytes = device.shape[1] * device.shape[2]
        num_staged = min(len(host), max(1, staging_bytes // block_bytes))
        self._staging = torch.empty((num_staged, *self._device.shape[1:]), dtype=word, device=device.device)

    def of_pieces(self, pieces: slice) -> "StagedCopier":
        """A copier of these pieces of blocks, through the same buffer. On the host they lie together, at its front."""
        other = copy.copy(self)
        other._device = self._device[:, pieces]
        shape = other._device.shape[1:]
        other._host, other._staging = front(self._host, *shape), front(self._staging, *shape)
        return other

    @torch.inference_mode()
    def copy(self, device_blocks: Sequence[int], host_blocks: Sequence[int], *, out: bool) -> None:
        """Issue copies of ``device_blocks`` to ``host_blocks``; with ``out`` False, in the other direction."""
        most = max(1, len(self._staging))
        for first in range(0, len(device_blocks), most):
            index = torch.tensor(device_blocks[first : first + most], device=self._device.device)
            staged = self._staging[: len(index)]
            if out:
                torch.index_select(self._device, 0, index, out=staged)
            for at, host, count in runs(host_blocks[first : first + most], self._blocks_per_chunk):
                there, here = self._host[host : host + count], staged[at : at + count]
                if out:
                    there.copy_(here, non_blocking=True)
                else:
                    here.copy_(there, non_blocking=True)
            if not out:
                self._device.index_copy_(0, index, staged)


def front(blocks: Tensor, num_pieces: int, piece_size: int) -> Tensor:
    """The front of a contiguous ``blocks``, as if as many smaller blocks of this shape lay there."""
    return blocks.view(-1)[: len(blocks) * num_pieces * piece_size].view(len(blocks), num_pieces, piece_size)


def runs(blocks: Sequence[int], blocks_per_chunk: int) -> Iterator[tuple[int, int, int]]:
    """Runs of neighbouring blocks within a chunk, each for one copy: (index in ``blocks``, first block, number of
    blocks).
    """
    at = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or blocks[end] != blocks[end - 1] + 1 or blocks[end] % blocks_per_chunk == 0:
            yield at, blocks[at], end - at
            at = end
