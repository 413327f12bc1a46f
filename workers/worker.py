"""The worker process: one engine, its instance's core, and the node that joins them to the cluster."""

import asyncio
import secrets
from collections.abc import Callable

import uvloop

from actorserve.actors.program import make_node, on_termination
from actorserve.core.effects import Drained, Effect
from actorserve.core.kv.tickets import KEY_BYTES
from actorserve.core.messages import Drain, MemoryLimit, Role, WorkerInfo
from actorserve.core.timing.profile import Profile
from actorserve.core_configs import EngineSizes, instance_recipe
from actorserve.processes.child import Child
from actorserve.settings import Settings
from workers.engine import Engine
from workers.engines.engine_thread import EngineThread
from workers.engines.make_engine import load_engine
from workers.kv_transfer.transfer import KVTransfer
from workers.memory import PoolWatch
from workers.profile.worker_profile import profile_of

_MEASURE_MEMORY_S = 1.0
_END_S = 5.0  # for a step in flight that nobody waits for


def main(child: Child) -> None:
    """Load the model, then compute until told to end; then finish what runs, or move it elsewhere.

    Whoever started this process has it end within the drain's time (SIGTERM); the coordinator leaves it all the time
    that it needs (Drain), and after that it is not to be started again by itself.
    """
    # Before the loop: nobody waits for this process yet.
    engine = load_engine(child)
    watch = _pool_watch(child, engine)  # before anything is written to the pools
    profile = profile_of(engine, child.settings, child.status)
    uvloop.run(_run(child, engine, profile, watch))


def sizes_of(engine: Engine, settings: Settings) -> EngineSizes:
    """What the engine holds; ``settings`` are resolved."""
    return EngineSizes(
        engine.num_blocks,
        engine.tokens_per_block,
        engine.bytes_per_block,
        engine.model.max_tokens,
        engine.num_host_blocks,
        is_cpu=settings.workers.device == "cpu",
    )


async def _run(child: Child, engine: Engine, profile: Profile, watch: PoolWatch | None) -> None:
    settings = child.settings
    ticket_key = secrets.token_bytes(KEY_BYTES)
    recipe = instance_recipe(settings, sizes_of(engine, settings), profile, ticket_key)
    core = recipe.make()
    transfer = KVTransfer(
        engine.kv,
        f"ipc://{child.runtime_dir}/{child.name}.kv.sock",
        ticket_key,
        bytes_per_s=recipe.config.migration.bytes_per_s,
    )
    thread = EngineThread(engine, transfer)
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
        worker=WorkerInfo(engine.kind, engine.model, profile.speed(), transfer.access),
        recipe=recipe,
        on_down=transfer.forget,
    )
    thread.start(node.inject)
    was_terminated = False

    def end() -> None:
        nonlocal was_terminated
        if not was_terminated:
            was_terminated = True
            node.inject(Drain())
            asyncio.get_running_loop().call_later(settings.cluster.drain_timeout_s, drained.set)

    on_termination(end)
    child.status.ready()
    async with asyncio.TaskGroup() as group:
        watching = [group.create_task(_watch(thread), name="engine")]
        if watch is not None:
            watching.append(group.create_task(_watch_memory(watch, engine, node.inject), name="memory"))
        group.create_task(node.run(), name="node")
        await drained.wait()
        if not was_terminated:
            child.status.stopped("it is not needed now")
        node.stop()
        for task in watching:
            task.cancel()
    transfer.close()
    thread.stop(_END_S)


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
