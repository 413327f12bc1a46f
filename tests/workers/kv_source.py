"""A process with KV pools that tests read, and the pools' contents.

``python -m tests.workers.kv_source BIND DEVICE`` prints its KVAccess as JSON, and serves until its input ends. With a
third argument it serves with keys, as host ``there``.
"""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from actorserve.core.kv.tickets import make_ticket
from actorserve.core.messages import KVAccess, KVTicket, TransferId, TransferKind
from actorserve.wire.trust import HostKey, KeyPair, PublicKeys, Trust
from workers.kv.layer_progress import LayerProgress
from workers.kv.pools import BlockMemory, Bytes, HostBlocks, KVPools, layout_digest, view
from workers.kv.shared_memory import SharedMemory
from workers.kv_transfer.cuda import CudaBlocks
from workers.kv_transfer.transfer import KVTransfer

HERE = KeyPair("Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID", "D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs")
THERE = KeyPair("rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7", "JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6")
KEYS = PublicKeys({"here": HostKey(HERE.public_key), "there": HostKey(THERE.public_key)})
"""The keys of two hosts, which all processes of the tests know (they are the examples of ZeroMQ's manual)."""

ROOT = Path(__file__).resolve().parents[2]
KEY = b"a key of tests"
SHAPE = (4, 8192)  # of a block, so that 128 blocks make a chunk
NUM_LAYERS = 2  # of two pieces each
NUM_BLOCKS = 400
NUM_HOST_BLOCKS = 50


def content(num_blocks: int, seed: int) -> Bytes:
    """A pool's random bytes, [num_blocks, *SHAPE]."""
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, *SHAPE), dtype=np.uint8)


def make_pools(seed: int = 0, device: str = "cpu") -> KVPools:
    """Pools of ``content``: the device's with ``seed``, the host's with ``seed + 1``."""
    pieces, piece_bytes = SHAPE
    host_memory = SharedMemory(NUM_HOST_BLOCKS * pieces * piece_bytes)
    host = view(host_memory.buffer, NUM_HOST_BLOCKS, SHAPE, on_host=True)
    host[:] = content(NUM_HOST_BLOCKS, seed + 1)
    memory, blocks = None, content(NUM_BLOCKS, seed)
    pool: BlockMemory
    if device == "cpu":
        memory = SharedMemory(NUM_BLOCKS * pieces * piece_bytes)
        array = view(memory.buffer, NUM_BLOCKS, SHAPE, on_host=False)
        array[:] = blocks
        pool = HostBlocks(array)
    else:
        whole = torch.from_numpy(blocks).transpose(0, 1).contiguous().to(device)
        pool = CudaBlocks(whole.transpose(0, 1))
    progress = LayerProgress(NUM_LAYERS)
    return KVPools(layout_digest(shape=SHAPE), SHAPE, pool, HostBlocks(host), memory, host_memory, progress=progress)


def held(pools: KVPools, *, on_host: bool = False) -> Bytes:
    """The present bytes of the device's pool, or of the host's."""
    pool = pools.pool(on_host=on_host)
    out = np.empty((pool.num_blocks, *SHAPE), dtype=np.uint8)
    pool.read(range(pool.num_blocks), out)
    return out


_numbers = itertools.count(1)


def ticket_for(blocks: Sequence[int], *, on_host: bool = False, step_id: int = 0, by_layer: bool = False) -> KVTicket:
    """A fresh ticket for these blocks."""
    transfer = TransferId(TransferKind.MIGRATION, next(_numbers))
    return make_ticket(KEY, transfer, 0, tuple(blocks), on_host=on_host, step_id=step_id, by_layer=by_layer)


@contextmanager
def source_process(
    bind: str, device: str = "cpu", *, keys: bool = False
) -> Iterator[tuple[KVAccess, "subprocess.Popen[str]"]]:
    """A source in a process of its own, with ``make_pools(device=device)``."""
    command = [sys.executable, "-m", "tests.workers.kv_source", bind, device, *(["keys"] if keys else [])]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    with process, process.stdin, process.stdout:
        try:
            yield KVAccess(**json.loads(process.stdout.readline())), process
        finally:
            process.kill()


def main(bind: str, device: str, keys: str = "") -> None:
    trust = Trust(THERE, KEYS) if keys else None
    transfer = KVTransfer(make_pools(device=device), bind, KEY, trust=trust)
    sys.stdout.write(json.dumps(asdict(transfer.access)) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    transfer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
