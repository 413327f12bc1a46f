"""When a GPU's memory is short, as its driver tells, fewer KV blocks are used."""

import asyncio
import tempfile
from functools import partial

import pytest

from actorserve.core.messages import MemoryLimit, Message, PowerReading
from tests.workers.power.fake_driver import FakeDriver
from workers.engines.fake_engine import FakeEngine
from workers.kv_transfer.transfer import KVTransfer
from workers.pool_watch import GpuPressure
from workers.power.sensor import open_sensor
from workers.worker_engine import WorkerEngine

DEADLINE_S = 30.0
MIB = 2**20


@pytest.mark.parametrize(
    ("first", "free", "blocks"),
    [
        (80 * MIB, 80 * MIB, 100),
        (80 * MIB, 10 * MIB, 100),
        (80 * MIB, 10 * MIB - 1, 99),
        (80 * MIB, 4 * MIB, 97),
        (80 * MIB, 0, 95),
        (2**40, 512 * MIB, 100),
        (2**40, 0, 0),
    ],
)
def test_what_is_missing_of_the_margin_comes_out_of_the_pool(first: int, free: int, blocks: int) -> None:
    """The margin is an eighth of the first free memory, at most 512 MiB, and the pool has 100 blocks of 2 MiB."""
    pressure = GpuPressure(100, 2 * MIB)
    assert pressure.num_usable_blocks(first) == 100
    assert pressure.num_usable_blocks(free) == blocks
    assert pressure.num_usable_blocks(first) == 100


async def test_a_worker_is_told_while_its_gpus_memory_is_short(loaded_driver: FakeDriver) -> None:
    """Another process takes the GPU's memory and frees it again: the pool shrinks, and has its size again."""
    engine, told = FakeEngine(), asyncio.Queue[Message]()
    for name, size in (("memory_total", 80 * 2**30), ("memory_free", 2**30)):
        loaded_driver.put(0, name, size)
    opener = partial(open_sensor, "cuda", {"CUDA_VISIBLE_DEVICES": "GPU-0"})

    async def next_limit() -> int:
        while not isinstance(message := await told.get(), MemoryLimit):
            assert isinstance(message, PowerReading)
        return message.num_blocks

    with tempfile.TemporaryDirectory(prefix="as-") as folder:
        transfer = KVTransfer(engine.kv, f"ipc://{folder}/kv.sock", b"key")
        worker = WorkerEngine(engine, transfer, None, opener)
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            running = group.create_task(worker.run(told.put_nowait))
            assert isinstance(await told.get(), PowerReading), "there is no pressure at first"
            loaded_driver.put(0, "memory_free", 2**27 - engine.bytes_per_block)
            assert await next_limit() == engine.num_blocks - 1
            loaded_driver.put(0, "memory_free", 2**30)
            assert await next_limit() == engine.num_blocks
            running.cancel()
        worker.stop(DEADLINE_S)
        transfer.close()
