"""The other processes of ``tools/bench transport``: a source of KV, a sender over bare pyzmq, and a pair of gloo's."""

import contextlib
import itertools
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import zmq
from torch import distributed, multiprocessing

from workers.kv.pools import HostBlocks, KVPools, layout_digest, view
from workers.kv.shared_memory import SharedMemory
from workers.kv_transfer.transfer import KVTransfer

KEY = b"transport"


def make_pools(num_blocks: int, pieces: int, piece_bytes: int) -> KVPools:
    """A CPU's pool with every page written, and an empty host pool."""
    shape = (pieces, piece_bytes)
    memory = SharedMemory(num_blocks * pieces * piece_bytes)
    pool = view(memory.buffer, num_blocks, shape, on_host=False)
    pool[:] = 1
    no_blocks = view(b"", 0, shape, on_host=True)
    return KVPools(layout_digest(shape=shape), shape, HostBlocks(pool), HostBlocks(no_blocks), memory)


def _tell(line: str) -> None:
    print(line, flush=True)


def source(bind: str, num_blocks: int, pieces: int, piece_bytes: int) -> None:
    """Print how to read the pool, and serve it."""
    transfer = KVTransfer(make_pools(num_blocks, pieces, piece_bytes), bind, KEY)
    _tell(json.dumps(asdict(transfer.access)))
    sys.stdin.read()


def bare(message_bytes: int, num_messages: int) -> None:
    """Send one message for each byte of a request, cycling through ``num_messages`` neighbouring buffers."""
    bodies = itertools.cycle(memoryview(bytearray(b"\1" * message_bytes)) for _ in range(num_messages))
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind("tcp://127.0.0.1:*")
    _tell(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    while True:
        reader, asked = socket.recv_multipart()
        for _ in asked:
            socket.send_multipart([reader, next(bodies)], copy=False)


def gloo(num_bytes: int, folder: str) -> None:
    """Start a sending process, receive from it once for each line on stdin, and print a line after each transfer."""
    sender = multiprocessing.get_context("spawn").Process(target=_send_by_gloo, args=(num_bytes, folder), daemon=True)
    sender.start()
    _join(folder, 1)
    body = torch.ones(num_bytes, dtype=torch.uint8)
    asked = torch.ones(1, dtype=torch.uint8)
    for _ in sys.stdin:  # when stdin ends, this process and the sender end
        distributed.send(asked, 0)
        distributed.recv(body, 0)
        _tell("received")


def _send_by_gloo(num_bytes: int, folder: str) -> None:
    _join(folder, 0)
    body = torch.ones(num_bytes, dtype=torch.uint8)
    asked = torch.ones(1, dtype=torch.uint8)
    with contextlib.suppress(RuntimeError):  # the receiver was ended
        while True:
            distributed.recv(asked, 1)
            distributed.send(body, 1)


def _join(folder: str, rank: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{Path(folder) / 'gloo'}", rank=rank, world_size=2)


def main(kind: str, *arguments: str) -> None:
    match kind, arguments:
        case "source", (bind, num_blocks, pieces, piece_bytes):
            source(bind, int(num_blocks), int(pieces), int(piece_bytes))
        case "bare", (message_bytes, num_messages):
            bare(int(message_bytes), int(num_messages))
        case "gloo", (num_bytes, folder):
            gloo(int(num_bytes), folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
