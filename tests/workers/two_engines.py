"""Two real engines of one model, each with its KV's transfer."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from actorserve.core.messages import Peer
from actorserve.model_files.description import ModelDescription
from tests.workers.workloads import NUM_HOST_BLOCKS, TOKENS_PER_BLOCK
from workers.engine_options import EngineOptions
from workers.engines.torch_engine import TorchEngine
from workers.kv_transfer.transfer import KVTransfer

PEERS = (Peer("worker-0", 1), Peer("worker-1", 1))
KEY = b"a key of tests"


@contextmanager
def two_engines(
    description: ModelDescription, folder: Path, dtype: str, token_bytes: int
) -> Iterator[tuple[list[TorchEngine], list[KVTransfer]]]:
    engines = [
        TorchEngine(
            description,
            EngineOptions(
                dtype=dtype,
                tokens_per_block=TOKENS_PER_BLOCK,
                kv_cache_bytes=4 * 2**20,
                host_kv_bytes=NUM_HOST_BLOCKS * TOKENS_PER_BLOCK * token_bytes,
            ),
        )
        for _ in PEERS
    ]
    transfers = [KVTransfer(engine.kv, f"ipc://{folder}/{i}.sock", KEY) for i, engine in enumerate(engines)]
    yield engines, transfers
    for transfer in transfers:
        transfer.close()
