"""The other process of ``tools/bench keys``: a coordinator or a worker that only answers, or a source of KV."""

import asyncio
import json
import sys
from dataclasses import asdict

import uvloop

from actorserve.core.messages import Peer, Place, Placed, Resend, Tokens
from actorserve.wire.trust import HostKey, KeyPair, PublicKeys, Trust
from actorserve.wire.zmq_transport import ZmqTransport

HERE = KeyPair("Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID", "D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs")
THERE = KeyPair("rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7", "JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6")
KEYS = PublicKeys({"here": HostKey(HERE.public_key), "there": HostKey(THERE.public_key)})
"""The keys of two hosts: the examples of ZeroMQ's manual."""

ANYWHERE = "tcp://127.0.0.1:*"
GATEWAY = Peer("here/gateway-0", 1)
COORDINATOR = Peer("there/coordinator", 1)
WORKER = Peer("there/worker-0", 1)
BATCH = 16
"""Requests in each message of tokens."""


async def _answer(me: Peer, gateway_address: str, trust: Trust | None) -> None:
    """Print the address, and answer until stdin ends."""
    transport = ZmqTransport(me, ANYWHERE, trust=trust)
    transport.connect(GATEWAY, gateway_address, takes_bundles=True)
    ids = tuple(f"request-{number}" for number in range(BATCH))
    tokens = Tokens(ids, (1,) * BATCH, (1000,) * BATCH, (50_000,) * BATCH)

    def answer() -> None:
        for _, message in transport.take():
            if isinstance(message, Place):
                transport.send(GATEWAY, Placed(message.request_id, message.epoch, WORKER))
            elif isinstance(message, Resend):
                for _ in range(message.from_position):
                    transport.send(GATEWAY, tokens)

    transport.on_arrival(answer)
    print(transport.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    transport.close()


def _serve_kv(trust: Trust | None, num_blocks: int, pieces: int, piece_bytes: int) -> None:
    # torch takes long to load, and processes that only send messages are started for each measurement
    from tools.benchmarks.cluster.transport_peer import KEY, make_pools
    from workers.kv_transfer.transfer import KVTransfer

    transfer = KVTransfer(make_pools(num_blocks, pieces, piece_bytes), ANYWHERE, KEY, trust=trust)
    print(json.dumps(asdict(transfer.access)), flush=True)
    sys.stdin.read()
    transfer.close()


def main(kind: str, keys: str, *arguments: str) -> None:
    """``kind``: coordinator, worker or kv; ``keys``: with or without."""
    trust = Trust(THERE, KEYS) if keys == "with" else None
    if kind == "kv":
        _serve_kv(trust, *map(int, arguments))
    else:
        uvloop.run(_answer(COORDINATOR if kind == "coordinator" else WORKER, arguments[0], trust))


if __name__ == "__main__":
    main(*sys.argv[1:])
