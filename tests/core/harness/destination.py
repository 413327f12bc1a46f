"""Drives the destination of a migration: an instance to which the worker S offers a request."""

from dataclasses import replace

from actorserve.core.effects import Effect, Fetch, RunStep, Send
from actorserve.core.messages import (
    Copied,
    CopyDone,
    KVAccess,
    KVTicket,
    ModelInfo,
    Offer,
    Peer,
    PeerUp,
    RequestSpec,
    Role,
    Start,
    Started,
    Transfer,
    WorkerInfo,
)
from actorserve.core.migration.config import MigrationConfig
from tests.core.harness.driver import CONFIG, GATEWAY, Instance, migration_id, spec

S = Peer("worker-0", 1)
STRANGER = Peer("worker-2", 1)
ACCESS = KVAccess("fake", "there")
INFO = WorkerInfo("k", ModelInfo("m", 100, 1000), kv=ACCESS)
TIMEOUT_S = 2.0
DESTINATION = replace(
    CONFIG, num_blocks=16, max_context_tokens=64, max_batch_tokens=64, migration=MigrationConfig(timeout_s=TIMEOUT_S)
)
MOVED = replace(spec("r", 8, 40), output_token_ids=(9, 8))  # ten tokens, of which nine have KV: three blocks


def destination(**changes: object) -> Instance:
    """An instance that knows the gateway, and the worker S."""
    instance = Instance(replace(DESTINATION, **changes))  # type: ignore[arg-type]
    instance.handle(PeerUp(GATEWAY, Role.GATEWAY), sender=GATEWAY)
    instance.handle(PeerUp(S, Role.WORKER, INFO))
    return instance


def ticket(stage: int, *blocks: int, number: int = 1) -> KVTicket:
    return KVTicket(migration_id(number), stage, False, blocks, "secret")


def offer(request: RequestSpec = MOVED, num_computed: int = 8, *blocks: int, is_last: bool = False) -> Offer:
    return Offer(1, GATEWAY, request, num_computed, ticket(0, *(blocks or (40, 41))), is_last)


WHOLE = offer(MOVED, 9, 40, 41, 42, is_last=True)


def fetch_of(effects: list[Effect]) -> Fetch:
    [fetch] = [effect for effect in effects if isinstance(effect, Fetch)]
    return fetch


def num_used(instance: Instance) -> int:
    device = instance.state.memory.device
    return device.num_blocks - device.num_free_blocks


def copied(instance: Instance, fetch: Fetch, now: float = 0.0) -> list[Effect]:
    return instance.handle(CopyDone(fetch.copy_id, 0.01), now)


def with_copy(**changes: object) -> Instance:
    """A destination that has copied all of r's KV."""
    instance = destination(**changes)
    fetch = fetch_of(instance.handle(WHOLE, 0.0, S))
    assert copied(instance, fetch) == [Send(S, Copied(migration_id(), 0))]
    return instance


def adopted(instance: Instance) -> bool:
    """r's gateway starts it under the next epoch. Returns whether r goes on with the copied KV."""
    effects = instance.handle(Start(2, MOVED, transfer=Transfer(S, migration_id())))
    assert Send(GATEWAY, Started("r", 2)) in effects
    assert not instance.state.migration_destination
    [step] = [effect for effect in effects if isinstance(effect, RunStep)]
    assert step.plan.request_ids == ("r",)
    if step.plan.starts == (9,):
        assert step.plan.token_ids == ((8,),)
        return True
    assert step.plan.token_ids[0] == (*range(8), 9, 8)[step.plan.starts[0] :]
    return False


def assert_holds_nothing(instance: Instance) -> None:
    assert not instance.state.migration_destination
    assert not instance.state.memory.is_fetching
    assert num_used(instance) == 0
