"""The worker process: one engine, and the actor that computes with it.

Its main is here and not in ``actorserve.programs``, because only the worker's process may load torch.
"""

import gc
import os
import secrets
from functools import partial
from pathlib import Path

import uvloop

from actorserve.actors.cluster_trust import open_trust
from actorserve.actors.node import open_node
from actorserve.actors.worker import WorkerActor
from actorserve.core.kv.tickets import KEY_BYTES
from actorserve.core.messages import PROTOCOL_VERSION, Hello, InstanceRole, Role, WorkerInfo
from actorserve.core.replay import make_instance_core
from actorserve.core.timing.profile import Profile
from actorserve.core_configs import EngineSizes, instance_recipe
from actorserve.model_files.describe import describe
from actorserve.model_files.tokenizer import tokenizer_digest
from actorserve.processes.child import Child
from actorserve.processes.signals import on_termination
from actorserve.processes.status import EXIT_RESTART
from actorserve.settings import Settings
from workers.engine import Engine
from workers.engines.make_engine import load_engine
from workers.kv_transfer.pacing import Rate
from workers.kv_transfer.transfer import KVTransfer
from workers.pool_watch import PoolWatch
from workers.power.sensor import open_sensor
from workers.profile.worker_profile import profile_of
from workers.worker_engine import WorkerEngine


def main(child: Child) -> None:
    """Load the model, then compute until told to end; then finish the running requests, or move them elsewhere.

    After a SIGTERM the worker ends within ``cluster.drain_timeout_s``. When the coordinator drains it, it takes all the
    time that its requests need, and the supervisor does not restart it.
    """
    # Loading comes before the event loop starts, because no peer waits for this process yet.
    engine = load_engine(child)
    watch = _pool_watch(child, engine)  # made before anything is written to the pools
    profile = profile_of(engine, child.settings, child.status)
    # A search for garbage that includes what is loaded would hold up the requests' tokens for 0.1 s.
    gc.collect()
    gc.freeze()
    gc.enable()
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
        layer_groups=engine.layer_groups,
        num_layers=engine.kv.num_layers,
        shows_progress=engine.kv.progress is not None,
    )


async def _run(child: Child, engine: Engine, profile: Profile, watch: PoolWatch | None) -> None:
    settings = child.settings
    ticket_key = secrets.token_bytes(KEY_BYTES)
    roles = settings.workers.roles
    role = InstanceRole(roles[child.index]) if child.index < len(roles) else InstanceRole.MIXED
    recipe = instance_recipe(settings, sizes_of(engine, settings), profile, ticket_key, role)
    core = make_instance_core(recipe)
    network = child.network
    trust = open_trust(child)
    kv_place = network.kv(child.name, child.index)
    transfer = KVTransfer(
        engine.kv,
        kv_place.bind,
        ticket_key,
        announced_host=kv_place.announced_host,
        rate=Rate(recipe.config.migration.bytes_per_s),
        trust=trust,
    )
    worker = WorkerInfo(engine.kind, engine.model, profile.speed(), transfer.access)
    hello = Hello(
        PROTOCOL_VERSION,
        Role.WORKER,
        worker=worker,
        model_digest=engine.weights_digest,
        tokenizer_digest=tokenizer_digest(describe(Path(settings.model.path), settings.model.load_format)),
    )
    node = open_node(child.name, hello, settings.cluster, network, recipe, trust)
    open_power = (
        None if settings.workers.engine == "fake" else partial(open_sensor, settings.workers.device, os.environ)
    )
    actor = WorkerActor(core, node, WorkerEngine(engine, transfer, watch, open_power), child.status)
    actor.on_reload_keys.append(child.reloads.run)
    child.reloads.start()
    on_termination(partial(actor.drain, settings.cluster.drain_timeout_s))
    child.status.ready()
    await actor.run()
    if actor.comes_back and not child.status.is_heard:
        raise SystemExit(EXIT_RESTART)


def _pool_watch(child: Child, engine: Engine) -> PoolWatch | None:
    """None for a pool on a GPU, whose memory is all allocated at the start, and for a fake engine's pool."""
    if child.settings.workers.device != "cpu" or child.settings.workers.engine == "fake":
        return None
    return PoolWatch(engine.num_blocks, engine.bytes_per_block, child.count, num_host_blocks=engine.num_host_blocks)
