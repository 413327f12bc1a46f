"""The worker process: one engine, and the actor that computes with it.

Its main is here and not in ``actorserve.programs``, because only the worker's process may load torch.
"""

import secrets
from functools import partial

import uvloop

from actorserve.actors.node import address_of, open_node
from actorserve.actors.worker import WorkerActor
from actorserve.core.instance.config import InstanceConfig
from actorserve.core.kv.tickets import KEY_BYTES
from actorserve.core.messages import PROTOCOL_VERSION, Hello, Role
from actorserve.core.migration.source import MigrationConfig, MigrationMode
from actorserve.core.replay import InstanceRecipe
from actorserve.core.scheduling.swapping import SwapMode
from actorserve.core.timing.profile import Profile
from actorserve.processes.child import Child
from actorserve.processes.signals import on_termination
from actorserve.settings import Settings
from workers.engine import Engine
from workers.engines.make_engine import load_engine
from workers.kv_transfer.pacing import Rate
from workers.kv_transfer.transfer import KVTransfer
from workers.memory import PoolWatch
from workers.profile.worker_profile import profile_of
from workers.worker_engine import WorkerEngine

_CPU_BYTES_PER_S = 32 * 2**20  # copying takes the cores that neighbours compute with; so it takes a few percent


def main(child: Child) -> None:
    """Load the model, then compute until told to end; then finish the running requests, or move them elsewhere.

    After a SIGTERM the worker ends within the drain's time. When the coordinator drains it, it takes all the time that
    its requests need, and the supervisor does not restart it.
    """
    # Loading comes before the event loop starts, because no peer waits for this process yet.
    engine = load_engine(child)
    watch = _pool_watch(child, engine)  # made before anything is written to the pools
    profile = profile_of(engine, child.settings, child.status)
    uvloop.run(_run(child, engine, profile, watch))


def instance_config(engine: Engine, settings: Settings, ticket_key: bytes = b"") -> InstanceConfig:
    """The instance's sizes: what the engine holds, and how much of it one iteration may take.

    Whoever shows a ticket made with ``ticket_key`` may read the engine's KV.
    """
    migration = settings.migration
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
        headroom_bytes={
            priority: num_tokens * engine.bytes_per_block // engine.tokens_per_block
            for priority, num_tokens in settings.workers.headroom_tokens_by_priority.items()
        },
        migration=MigrationConfig(
            MigrationMode(migration.mode),
            ticket_key.hex(),
            max_outgoing=migration.max_outgoing,
            timeout_s=migration.timeout_s,
            bytes_per_s=bytes_per_s(settings),
        ),
        checkpoint_tokens=migration.checkpoint_tokens,
    )


def bytes_per_s(settings: Settings) -> int | None:
    """What KV a worker reads of another in a second; None: as much as goes."""
    given = settings.migration.bytes_per_s
    return _CPU_BYTES_PER_S if given is None and settings.workers.device == "cpu" else given


def instance_origin(config: InstanceConfig, settings: Settings, profile: Profile) -> InstanceRecipe:
    """What the core of one instance is made from."""
    workers = settings.workers
    return InstanceRecipe(
        config,
        profile,
        workers.policy,
        promote_after_s=workers.promote_after_s,
        promote_after_s_of=workers.promote_after_by_priority_s,
        min_share=workers.min_share,
    )


async def _run(child: Child, engine: Engine, profile: Profile, watch: PoolWatch | None) -> None:
    settings = child.settings
    ticket_key = secrets.token_bytes(KEY_BYTES)
    recipe = instance_origin(instance_config(engine, settings, ticket_key), settings, profile)
    core = recipe.make()
    kv_address = f"ipc://{child.runtime_dir}/{child.name}.kv.sock"
    transfer = KVTransfer(engine.kv, kv_address, ticket_key, rate=Rate(bytes_per_s(settings)))
    hello = Hello(
        PROTOCOL_VERSION,
        Role.WORKER,
        address_of(child.name, child.runtime_dir),
        engine.kind,
        engine.model,
        speed=profile.speed(),
        kv=transfer.access,
    )
    node = open_node(child.name, hello, settings.cluster, child.runtime_dir, recipe)
    actor = WorkerActor(core, node, WorkerEngine(engine, transfer, watch), child.status)
    on_termination(partial(actor.drain, settings.cluster.drain_timeout_s))
    child.status.ready()
    await actor.run()


def _pool_watch(child: Child, engine: Engine) -> PoolWatch | None:
    """None for a pool on a GPU, whose memory is all allocated at the start, and for a fake engine's pool."""
    if child.settings.workers.device != "cpu" or child.settings.workers.engine == "fake":
        return None
    return PoolWatch(engine.num_blocks, engine.bytes_per_block, child.count, num_host_blocks=engine.num_host_blocks)
