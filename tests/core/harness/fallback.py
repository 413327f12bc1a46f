"""Gateways that place requests by themselves, and the reports of their workers."""

from math import inf

from actorserve.core.effects import Effect, Send
from actorserve.core.gateway.config import GatewayConfig
from actorserve.core.messages import (
    Cordon,
    InstanceRole,
    LoadDigest,
    LoadReport,
    Peer,
    PeerDown,
    PeerUp,
    RequestSpec,
    Role,
    SamplingParams,
    Start,
    WorkerInfo,
)
from tests.core.harness.gateway import COORDINATOR, MODEL, Gateway

BLOCK_TOKENS = 4
BLOCK_BYTES = 10
NUM_BLOCKS = 10


def report(
    sequence: int = 1,
    num_free_blocks: int = NUM_BLOCKS,
    accepted: tuple[str, ...] = (),
    num_waiting: int = 0,
    *,
    draining: bool = False,
    cordon: Cordon = Cordon.OPEN,
    role: InstanceRole = InstanceRole.MIXED,
) -> LoadReport:
    """The report of a worker with ten blocks of four tokens."""
    used_bytes = (NUM_BLOCKS - num_free_blocks) * BLOCK_BYTES
    return LoadReport(
        sequence=sequence,
        num_running=0,
        num_waiting=num_waiting,
        kv_total_bytes=NUM_BLOCKS * BLOCK_BYTES,
        kv_used_bytes=used_bytes,
        virtual_usage_bytes=used_bytes,
        bytes_per_block=BLOCK_BYTES,
        tokens_per_block=BLOCK_TOKENS,
        num_preemptions=0,
        accepted=accepted,
        draining=draining,
        kv_needed_bytes=used_bytes,
        cordon=cordon,
        role=role,
    )


def spec(name: str, num_blocks: int = 1, priority: int = 0) -> RequestSpec:
    prompt = (1,) * (num_blocks * BLOCK_TOKENS)
    return RequestSpec(name, prompt, SamplingParams(seed=5, max_tokens=10), priority=priority)


def knowing(
    reports: dict[Peer, LoadReport], *, met_coordinator: bool = True, max_queue: int = 64, report_ttl_s: float = inf
) -> Gateway:
    """Sessions that know these workers, and a coordinator if ``met_coordinator``."""
    config = GatewayConfig(
        1.0,
        no_instance_timeout_s=30.0,
        resume_timeout_s=600.0,
        max_queue_per_instance=max_queue,
        report_ttl_s=report_ttl_s,
    )
    gateway = Gateway(config)
    if met_coordinator:
        gateway.handle(PeerUp(COORDINATOR, Role.COORDINATOR), 0.0)
    for peer, load in reports.items():
        gateway.handle(PeerUp(peer, Role.WORKER, WorkerInfo("k", MODEL)), 0.0)
        if not met_coordinator:
            gateway.handle(load, 0.0, peer)
    if met_coordinator:
        gateway.handle(LoadDigest(tuple(reports), tuple(reports.values())), 0.0, COORDINATOR)
    return gateway


def alone(reports: dict[Peer, LoadReport], max_queue: int = 64) -> Gateway:
    """Sessions that know these workers, after the coordinator has gone."""
    gateway = knowing(reports, max_queue=max_queue)
    assert gateway.handle(PeerDown(COORDINATOR), 0.0) == []
    return gateway


def started(effects: list[Effect]) -> list[tuple[str, Peer, int]]:
    """Each started request, its worker and its epoch."""
    return [
        (effect.message.request.request_id, effect.to, effect.message.epoch)
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.message, Start)
    ]
