"""Drives the source of a migration: an instance that knows two possible destinations."""

from dataclasses import replace

from actorserve.core.effects import Effect, Send
from actorserve.core.kv.tickets import make_ticket
from actorserve.core.messages import (
    NEWCOMER,
    Copied,
    HandOver,
    KVAccess,
    KVTicket,
    Message,
    MigrateTo,
    ModelInfo,
    Offer,
    Peer,
    PeerUp,
    Role,
    Stage,
    Tokens,
    TransferId,
    WorkerInfo,
)
from actorserve.core.migration.config import MigrationConfig, MigrationMode
from actorserve.core.request import Request
from tests.core.harness.driver import CONFIG, GATEWAY, Instance, migration_id, spec

COORDINATOR = Peer("coordinator", 1)
D = Peer("worker-1", 1)
E = Peer("worker-2", 1)
KEY = "5eed"
ACCESS = KVAccess("fake", "there")
INFO = WorkerInfo("k", ModelInfo("m", 100, 1000), kv=ACCESS)
TIMEOUT_S = 2.0
SOURCE = replace(
    CONFIG,
    num_blocks=64,
    max_context_tokens=200,
    max_batch_tokens=64,
    migration=MigrationConfig(ticket_key=KEY, timeout_s=TIMEOUT_S),
)
STAGES = ["copying", "last due", "paused", "handing over"]


def source(mode: MigrationMode = MigrationMode.LIVE, max_outgoing: int = 4, **changes: object) -> Instance:
    """An instance that knows the workers D and E."""
    config = replace(SOURCE.migration, mode=mode, max_outgoing=max_outgoing)
    instance = Instance(replace(SOURCE, migration=config, **changes))  # type: ignore[arg-type]
    for peer in (D, E):
        instance.handle(PeerUp(peer, Role.WORKER, INFO))
    return instance


def decoding(
    instance: Instance, name: str = "r", num_prompt: int = 5, max_tokens: int = 100, priority: int = 0
) -> None:
    """A request arrives and gets its first token; the other requests get tokens meanwhile."""
    instance.start(replace(spec(name, num_prompt, max_tokens), priority=priority))
    while not request_of(instance, name).num_output:
        instance.done()


def request_of(instance: Instance, name: str = "r") -> Request:
    return instance.state.requests[name]


def order(
    instance: Instance, to: Peer = D, num_bytes: int = 10_000, ttl_s: float = 5.0, now: float = 0.0
) -> list[Effect]:
    return instance.handle(MigrateTo(to, num_bytes, ttl_s), now, COORDINATOR)


def ticket(transfer: TransferId, stage: int, *blocks: int, on_host: bool = False) -> KVTicket:
    return make_ticket(bytes.fromhex(KEY), transfer, stage, blocks, on_host=on_host)


def told(effects: list[Effect], *peers: Peer) -> list[Message]:
    """The messages to these peers, except tokens."""
    return [
        effect.message
        for effect in effects
        if isinstance(effect, Send) and effect.to in peers and not isinstance(effect.message, Tokens)
    ]


def hand_over(num_output: int, number: int = 1, to: Peer = D, name: str = "r", epoch: int = 1) -> HandOver:
    """``number`` 0: no KV was copied."""
    return HandOver(name, epoch, to, migration_id(number) if number else None, num_output, NEWCOMER)


def at(stage: str, **changes: object) -> Instance:
    """A source whose only request r is at this stage of its migration to D."""
    instance = source(**changes)  # type: ignore[arg-type]
    decoding(instance)
    assert isinstance(told(order(instance), D)[0], Offer)
    order(instance, num_bytes=0)  # no other request is to move
    if stage == "copying":
        return instance
    instance.handle(Copied(migration_id(), 0), 0.0, D)
    if stage == "last due":
        return instance
    instance.done()
    assert isinstance(told(instance.effects, D)[0], Stage)
    if stage == "paused":
        return instance
    instance.handle(Copied(migration_id(), 1), 0.0, D)
    assert isinstance(told(instance.effects, GATEWAY)[0], HandOver)
    return instance


def assert_goes_on(instance: Instance, name: str = "r") -> None:
    """The request decodes with the blocks that it has: nothing is computed again, and its tokens continue."""
    request = request_of(instance, name)
    blocks = list(request.blocks)
    for _ in range(3):
        plan = instance.plan
        assert plan is not None
        row = plan.request_ids.index(name)
        num_tokens = len(request.token_ids)
        assert plan.starts[row] == num_tokens - 1
        assert plan.token_ids[row] == (request.token_ids[-1],)
        assert plan.block_tables[row][: len(blocks)] == tuple(blocks)
        instance.done()
        assert len(request.token_ids) == num_tokens + 1
    assert not instance.state.migration_source.paused


def assert_holds_nothing(instance: Instance) -> None:
    memory = instance.state.memory
    assert not instance.state.requests
    assert not instance.state.migration_source
    assert not instance.state.migration_source.paused
    assert memory.device.num_free_blocks == memory.device.num_blocks
    assert memory.host.num_free_blocks == memory.host.num_blocks


def chosen(instance: Instance) -> list[str]:
    """The outgoing requests, in the order in which they were chosen."""
    return list(instance.state.migration_source._outgoing)


def short_of_memory(**changes: object) -> Instance:
    """r is about to lose its blocks to the next token of "other", which arrived first."""
    instance = source(num_blocks=6, max_context_tokens=24, max_outgoing=1, prefix_cache=False, **changes)  # type: ignore[arg-type]
    instance.start(spec("other", 8, 100))
    instance.start(replace(spec("r", 8, 100), priority=1))
    while request_of(instance).num_output < 3:
        instance.done()
    assert instance.state.memory.device.num_free_blocks == 0
    return instance
