"""The worker process: one engine, its instance's core, and the node that joins them to the cluster."""

import asyncio
import contextlib
from collections.abc import Callable

import uvloop

from actorserve.actors.process import make_node, on_termination
from actorserve.core.effects import Drained, Effect
from actorserve.core.instance import InstanceConfig
from actorserve.core.messages import Drain, MemoryLimit, Role
from actorserve.core.origin import InstanceOrigin
from actorserve.core.profile import Profile
from actorserve.core.swapping import SwapMode
from actorserve.processes.child import Child
from actorserve.settings import Settings
from workers.engine import Engine
from workers.engine_thread import EngineThread
from workers.load import load_engine
from workers.memory import PoolWatch
from workers.profiling import profile_of

_MEASURE_MEMORY_S = 1.0


def main(child: Child) -> None:
    """Load the model, then compute until told to end; then finish what runs, within the drain's time."""
    # Before the loop: nobody waits for this process yet.
    engine = load_engine(child)
    watch = _pool_watch(child, engine)  # before anything is written to the pools
    profile = profile_of(engine, child.settings, child.status)
    uvloop.run(_run(child, engine, profile, watch))


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
        num_host_blocks=engine.num_host_blocks,
        swap_mode=SwapMode(settings.workers.swap),
    )


def instance_origin(config: InstanceConfig, settings: Settings, profile: Profile) -> InstanceOrigin:
    """What the core of one instance is made from."""
    workers = settings.workers
    return InstanceOrigin(
        config,
        profile,
        workers.policy,
        promote_after_s=workers.promote_after_s,
        promote_after_s_of=workers.promote_after_by_priority_s,
        min_share=workers.min_share,
    )


async def _run(child: Child, engine: Engine, profile: Profile, watch: PoolWatch | None) -> None:
    settings = child.settings
    origin = instance_origin(instance_config(engine, settings), settings, profile)
    core = origin.make()
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
        speed=profile.speed(),
        origin=origin,
    )
    thread.start(node.inject)
    ending = asyncio.Event()
    on_termination(ending.set)
    child.status.ready()
    async with asyncio.TaskGroup() as group:
        watching = [group.create_task(_watch(thread), name="engine")]
        if watch is not None:
            watching.append(group.create_task(_watch_memory(watch, engine, node.inject), name="memory"))
        group.create_task(node.run(), name="node")
        await ending.wait()
        node.inject(Drain())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(drained.wait(), settings.cluster.drain_timeout_s)
        node.stop()
        for task in watching:
            task.cancel()
    thread.stop()


def _pool_watch(child: Child, engine: Engine) -> PoolWatch | None:
    """None for a pool on a GPU, which is taken whole at start, so that nobody can take it away; and for a fake one."""
    if child.settings.workers.device != "cpu" or child.settings.workers.engine == "fake":
        return None
    return PoolWatch(engine.num_blocks, engine.bytes_per_block, child.count, num_host_blocks=engine.num_host_blocks)


async def _watch_memory(watch: PoolWatch, engine: Engine, tell: Callable[[MemoryLimit], None]) -> None:
    """Tell the core how much of the pool memory has room for, each time that this changes."""
    told = engine.num_blocks
    while True:
        num_blocks = watch.num_usable_blocks(engine.num_written_host_blocks)
        if num_blocks != told:
            tell(MemoryLimit(num_blocks))
            told = num_blocks
        await asyncio.sleep(_MEASURE_MEMORY_S)


async def _watch(thread: EngineThread) -> None:
    """Raise what the engine raised."""
    await thread.failure
