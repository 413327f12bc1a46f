"""The worker process: one engine, its instance's core, and the node that joins them to the cluster."""

import asyncio
import contextlib
from collections.abc import Callable

import uvloop

from actorserve.actors.process import make_node, on_termination
from actorserve.core.effects import Drained, Effect
from actorserve.core.instance import InstanceConfig, InstanceState
from actorserve.core.messages import Drain, MemoryLimit, Role
from actorserve.core.policy import FirstComeFirstServed
from actorserve.processes.child import Child
from actorserve.settings import Settings
from workers.engine import Engine
from workers.engine_thread import EngineThread
from workers.load import load_engine
from workers.memory import PoolWatch

_MEASURE_MEMORY_S = 1.0


def main(child: Child) -> None:
    """Load the model, then compute until told to end; then finish what runs, within the drain's time."""
    engine = load_engine(child)  # before the loop: nobody waits for this process yet
    uvloop.run(_run(child, engine))


def instance_config(engine: Engine, settings: Settings) -> InstanceConfig:
    """The instance's sizes: what the engine holds, and how much of it one iteration may take."""
    return InstanceConfig(
        num_blocks=engine.num_blocks,
        tokens_per_block=engine.tokens_per_block,
        bytes_per_block=engine.bytes_per_block,
        max_context_tokens=engine.model.max_tokens,
        max_batch_requests=settings.workers.max_batch_requests,
        max_batch_tokens=settings.workers.max_batch_tokens,
        load_report_s=settings.cluster.load_report_s,
        retry_s=settings.cluster.retry_s,
        tpot_target_s=settings.workers.tpot_target_s,
        prefix_cache=settings.workers.prefix_cache,
    )


async def _run(child: Child, engine: Engine) -> None:
    settings = child.settings
    core = InstanceState(instance_config(engine, settings), FirstComeFirstServed())
    thread = EngineThread(engine)
    drained = asyncio.Event()

    def perform(effect: Effect) -> None:
        if isinstance(effect, Drained):
            drained.set()
        else:
            thread.perform(effect)

    node = make_node(
        child.name,
        Role.WORKER,
        core,
        perform,
        settings.cluster,
        child.runtime_dir,
        kind=engine.kind,
        model=engine.model,
    )
    thread.start(node.inject)
    ending = asyncio.Event()
    on_termination(ending.set)
    child.status.ready()
    async with asyncio.TaskGroup() as group:
        failing = group.create_task(_watch(thread), name="engine")
        group.create_task(node.run(), name="node")
        watching = group.create_task(_watch_memory(child, engine, node.inject), name="memory")
        await ending.wait()
        node.inject(Drain())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(drained.wait(), settings.cluster.drain_timeout_s)
        node.stop()
        failing.cancel()
        watching.cancel()
    thread.stop()


async def _watch_memory(child: Child, engine: Engine, tell: Callable[[MemoryLimit], None]) -> None:
    """Tell the core how much of the pool memory has room for, each time that this changes.

    A pool on a GPU is taken whole at start, so nobody can take it away; and a fake one is small.
    """
    if child.settings.workers.device != "cpu" or child.settings.workers.engine == "fake":
        return
    watch = PoolWatch(engine.num_blocks, engine.bytes_per_block, child.count)
    told = engine.num_blocks
    while True:
        num_blocks = watch.num_usable_blocks()
        if num_blocks != told:
            tell(MemoryLimit(num_blocks))
            told = num_blocks
        await asyncio.sleep(_MEASURE_MEMORY_S)


async def _watch(thread: EngineThread) -> None:
    """Raise what the engine raised."""
    await thread.failure
