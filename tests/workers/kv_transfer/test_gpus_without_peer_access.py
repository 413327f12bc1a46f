"""Two GPUs that cannot read each other's memory move KV by sockets."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from actorserve.core.effects import Fetch
from actorserve.core.messages import Peer
from tests.workers.kv_source import KEY, NUM_BLOCKS, content, held, make_pools, ticket_for
from workers.kv.pools import ALL_PIECES, Bytes, HostBlocks
from workers.kv_transfer.cuda import CudaBlocks
from workers.kv_transfer.errors import DirectCopyError, TransferError
from workers.kv_transfer.transfer import KVTransfer

OTHER_SEED = 10  # of the destination's initial KV


class FakeGpu(CudaBlocks):
    """A pool on a GPU, of which the host's memory plays the part. ``opens`` and ``copies``: peers' pools that it can
    open, and copies that succeed, before all fail.
    """

    def __init__(self, array: Bytes) -> None:
        self._here = HostBlocks(array)
        self.opens, self.copies = 0, 0
        self.num_opened = 0
        self.peer = torch.from_numpy(content(NUM_BLOCKS, 0))

    @property
    def num_blocks(self) -> int:
        return self._here.num_blocks

    def read(self, blocks: Sequence[int], out: Bytes, pieces: slice = ALL_PIECES) -> None:
        self._here.read(blocks, out, pieces)

    def write(
        self, blocks: Sequence[int], source: Bytes, source_blocks: Sequence[int], pieces: slice = ALL_PIECES
    ) -> None:
        self._here.write(blocks, source, source_blocks, pieces)

    def export(self) -> str:
        return "a handle"

    def open_peer(self, shown: str, num_blocks: int) -> Tensor:
        self.num_opened += 1
        if self.num_opened > self.opens:
            raise DirectCopyError("cannot open the KV pool on another GPU: no peer access")
        assert (shown, num_blocks) == ("a handle", NUM_BLOCKS)
        return self.peer

    def write_from_peer(
        self, blocks: Sequence[int], source: Tensor, source_blocks: Sequence[int], pieces: slice = ALL_PIECES
    ) -> None:
        if not self.copies:
            self._here.write(blocks[:1], content(1, 99), (0,))  # a copy may fail after a part of it
            raise DirectCopyError("cannot copy from the KV pool on another GPU: no peer access")
        self.copies -= 1
        self._here.write(blocks, source.numpy(), source_blocks, pieces)


class Setting:
    """A source that sends, and a destination on a ``gpu`` of the same host."""

    def __init__(self, folder: Path) -> None:
        self.source = KVTransfer(make_pools(), f"ipc://{folder}/source.kv", KEY)
        pools = make_pools(OTHER_SEED)
        self.gpu = FakeGpu(held(pools))
        self.pools = replace(pools, device=self.gpu, device_memory=None)
        self.destination = KVTransfer(self.pools, f"ipc://{folder}/destination.kv", b"another key", patience_s=1.0)

    def fetch(self, blocks: Sequence[int], incarnation: int = 1, *, is_urgent: bool = False) -> None:
        """Copy these blocks of the source to the same blocks here."""
        access = replace(self.source.access, shared="", shared_host="", cuda_ipc="a handle")
        source = Peer("source", incarnation)
        self.destination.fetch(Fetch(1, source, access, ticket_for(blocks), 0, tuple(blocks), is_urgent))

    def expect(self, blocks: Sequence[int]) -> None:
        """These blocks are the source's, and all others are as they were."""
        expected = content(NUM_BLOCKS, OTHER_SEED)
        expected[list(blocks)] = content(NUM_BLOCKS, 0)[list(blocks)]
        assert np.array_equal(held(self.pools), expected)


@pytest.fixture
def setting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Setting]:
    caplog.set_level(logging.WARNING, logger="workers")
    setting = Setting(tmp_path)
    yield setting
    setting.destination.close()
    setting.source.close()


def test_a_gpu_that_reaches_the_other_reads_it_directly(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    """With peer access all blocks come from GPU to GPU, through one opened pool, and nothing is logged."""
    setting.gpu.opens, setting.gpu.copies = 1, 2
    setting.source.close()  # so sockets would fail
    setting.fetch((3, 4))
    setting.fetch((9,))
    setting.expect((3, 4, 9))
    assert caplog.messages == []


@pytest.mark.parametrize("opens", [0, 1])
def test_the_source_sends_what_a_gpu_cannot_read(
    setting: Setting, caplog: pytest.LogCaptureFixture, opens: int
) -> None:
    """If the pool cannot be opened, or not be copied from, the same fetch succeeds by a socket; the log says why once,
    and later fetches of this source, urgent or not, do not try again.
    """
    setting.gpu.opens = opens
    setting.fetch((3, 4))
    setting.fetch((9,))
    setting.fetch((11,), is_urgent=True)
    setting.expect((3, 4, 9, 11))
    assert setting.gpu.num_opened == 1
    (said,) = caplog.messages
    assert said.startswith("KV of source comes by a socket")
    assert said.endswith("no peer access")


def test_a_source_that_starts_again_is_tried_again(setting: Setting) -> None:
    """A worker's next incarnation may be on another GPU, so its pool is opened again, once."""
    for incarnation in (1, 2, 2):
        setting.fetch((3,), incarnation)
    assert setting.gpu.num_opened == 2


def test_a_wrong_ticket_does_not_change_the_way(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    """A ticket for blocks that the source does not have fails, and the next fetch still goes from GPU to GPU."""
    setting.gpu.opens, setting.gpu.copies = 2, 1
    access = replace(setting.source.access, shared="", shared_host="", cuda_ipc="a handle")
    wrong = Fetch(1, Peer("source", 1), access, ticket_for((NUM_BLOCKS,)), 0, (0,), is_urgent=False)
    with pytest.raises(TransferError, match="blocks beyond the pool"):
        setting.destination.fetch(wrong)
    setting.fetch((5,))
    setting.expect((5,))
    assert setting.gpu.num_opened == 2
    assert caplog.messages == []
