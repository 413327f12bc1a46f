"""The worker's engine as its actor drives it: results, the pools' memory, and failures."""

import asyncio
import tempfile
from collections.abc import Iterator

import pytest

from actorserve.core.effects import AddToEngine, DropFromEngine, RunStep
from actorserve.core.messages import MemoryLimit, Message, RequestSpec, SamplingParams, StepDone, StepPlan
from workers.engines.fake_engine import FakeEngine
from workers.kv_transfer.transfer import KVTransfer
from workers.pool_watch import PoolWatch
from workers.worker_engine import WorkerEngine

DEADLINE_S = 10.0
SPEC = RequestSpec("r", (1, 2, 3), SamplingParams(seed=1, max_tokens=4))
STEP = RunStep(StepPlan(1, ("r",), (0,), ((1, 2, 3),), ((0,),), (True,)))


class ScarceMemory(PoolWatch):
    """Memory that has room for half of the pool."""

    def num_usable_blocks(self, num_written_host_blocks: int = 0) -> int:
        return self._num_blocks // 2


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def transfer(engine: FakeEngine) -> Iterator[KVTransfer]:
    with tempfile.TemporaryDirectory(prefix="as-") as folder:
        transfer = KVTransfer(engine.kv, f"ipc://{folder}/kv.sock", b"key")
        yield transfer
        transfer.close()


async def _first_message(worker: WorkerEngine) -> Message:
    """The first message that the engine sends."""
    told: asyncio.Queue[Message] = asyncio.Queue()
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        running = group.create_task(worker.run(told.put_nowait))
        message = await told.get()
        running.cancel()
    worker.stop(DEADLINE_S)
    return message


async def test_effects_that_came_before_run_are_performed(engine: FakeEngine, transfer: KVTransfer) -> None:
    """Effects are queued until the engine runs, and then their results are reported."""
    worker = WorkerEngine(engine, transfer, None)
    for effect in (AddToEngine(SPEC), STEP, DropFromEngine("r")):
        worker.perform(effect)
    assert isinstance(await _first_message(worker), StepDone)


async def test_a_change_of_the_usable_memory_is_reported(engine: FakeEngine, transfer: KVTransfer) -> None:
    """When memory has room for only a part of the pool, the core is told how many blocks that is."""
    memory = ScarceMemory(engine.num_blocks, engine.bytes_per_block, 1)
    worker = WorkerEngine(engine, transfer, memory)
    assert await _first_message(worker) == MemoryLimit(engine.num_blocks // 2)


async def test_a_bug_in_the_engine_comes_out_of_run(engine: FakeEngine, transfer: KVTransfer) -> None:
    """A step of a request that the engine does not know ends ``run`` with an exception."""
    worker = WorkerEngine(engine, transfer, None)
    worker.perform(STEP)
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(worker.run(lambda message: None), DEADLINE_S)
    assert caught.group_contains(KeyError)
    worker.stop(DEADLINE_S)
