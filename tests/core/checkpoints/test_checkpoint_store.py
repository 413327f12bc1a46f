"""Scenarios of a checkpoint holder: what it stores of another worker's requests, for how long, and how the requests go
on.
"""

from dataclasses import replace

import pytest

from actorserve.core.effects import CancelFetch, Effect, Fetch, Send, SwapIn
from actorserve.core.messages import (
    Attained,
    Checkpoint,
    CheckpointConfirmed,
    Copied,
    CopyDone,
    CopyFailed,
    Declined,
    DeclineReason,
    Drain,
    Peer,
    PeerDown,
    PeerUp,
    Release,
    Role,
    Start,
    Tick,
    Transfer,
    TransferId,
    Withdrawn,
)
from tests.core.harness.driver import CONFIG, GATEWAY, Instance, checkpoint_id, spec
from tests.core.harness.source import ACCESS, INFO, E, assert_holds_nothing, ticket, told

N, NEXT, THIRD = map(checkpoint_id, (1, 2, 3))
S = Peer("worker-0", 1)
PROMPT = tuple(range(20))


def holder(num_host_blocks: int = 16, **changes: object) -> Instance:
    """An instance that knows the worker S, and its gateway."""
    instance = Instance(replace(CONFIG, num_host_blocks=num_host_blocks, **changes))  # type: ignore[arg-type]
    instance.handle(PeerUp(GATEWAY, Role.GATEWAY))
    instance.handle(PeerUp(S, Role.WORKER, INFO))
    return instance


def read(
    instance: Instance,
    num_blocks: int,
    num_confirmed: int = 0,
    stage: int = 0,
    now: float = 0.0,
    transfer: TransferId = N,
) -> list[Effect]:
    """S has it read ``num_blocks`` blocks of r, whose tokens are PROMPT."""
    token_ids = PROMPT[4 * num_confirmed : 4 * (num_confirmed + num_blocks)]
    blocks = range(50 + num_confirmed, 50 + num_confirmed + num_blocks)
    message = Checkpoint("r", GATEWAY, num_confirmed, token_ids, ticket(transfer, stage, *blocks))
    return instance.handle(message, now, S)


def fetch_of(effects: list[Effect]) -> Fetch:
    [fetch] = [effect for effect in effects if isinstance(effect, Fetch)]
    return fetch


def keeps(num_blocks: int = 3, **changes: object) -> Instance:
    """A holder with ``num_blocks`` confirmed blocks of r."""
    instance = holder(**changes)  # type: ignore[arg-type]
    fetch = fetch_of(read(instance, num_blocks))
    instance.handle(CopyDone(fetch.copy_id, 0.01), 0.0)
    instance.handle(CheckpointConfirmed(N, 0), 0.0, S)
    return instance


def adopt(instance: Instance, token_ids: tuple[int, ...] = PROMPT[:18], now: float = 1.0) -> tuple[int, int]:
    """S has died, and the gateway starts r at the holder. Returns how many blocks are swapped in, and the first token
    that is computed.
    """
    output = token_ids[9:]
    request = replace(spec("r", 9, 12), prompt_token_ids=token_ids[:9], output_token_ids=output)
    effects = instance.handle(Start(2, request, Attained(), Transfer(S, N)), now)
    num_brought = sum(len(effect.device_blocks) for effect in effects if isinstance(effect, SwapIn))
    if num_brought:
        assert instance.plan is None
        instance.copied(now)
    assert instance.plan is not None
    assert instance.plan.token_ids[0][0] == token_ids[instance.plan.starts[0]]
    return num_brought, instance.plan.starts[0]


def finish(instance: Instance) -> None:
    """r runs to its end; then no block is in use."""
    while "r" in instance.state.requests:
        instance.done(now=1.0)
        while instance.copies:
            instance.copied(1.0)
    instance.handle(Release("r", 2), 1.0)
    assert_keeps_nothing(instance)


def assert_keeps_nothing(instance: Instance) -> None:
    assert not instance.state.checkpoint_store
    assert instance.state.memory.num_checkpoint_blocks == 0
    assert_holds_nothing(instance)


def test_a_holder_reads_into_its_hosts_pool_and_answers() -> None:
    """No device block is used, and checkpoints do not count as the holder's own load."""
    instance = holder()
    fetch = fetch_of(read(instance, 3))
    assert (fetch.source, fetch.access, fetch.num_skipped, fetch.is_urgent) == (S, ACCESS, 0, False)
    assert fetch.into_host
    assert fetch.ticket == ticket(N, 0, 50, 51, 52)
    assert len(fetch.blocks) == 3
    assert instance.handle(CopyDone(fetch.copy_id, 0.01), 0.0) == [Send(S, Copied(N, 0))]
    memory = instance.state.memory
    assert memory.device.num_free_blocks == memory.device.num_blocks
    assert (memory.host.num_free_blocks, memory.num_checkpoint_blocks, memory.held_blocks) == (13, 3, 0)


def test_a_request_goes_on_from_its_confirmed_blocks() -> None:
    """Confirmed blocks are swapped in, and only later tokens are computed."""
    instance = keeps()
    assert adopt(instance) == (3, 12)
    finish(instance)


def test_adoption_goes_up_to_the_last_block_that_was_confirmed() -> None:
    """Blocks that were read and not confirmed are void."""
    instance = keeps(2)
    fetch = fetch_of(read(instance, 2, num_confirmed=2, stage=1))
    instance.handle(CopyDone(fetch.copy_id, 0.01), 0.0)
    assert adopt(instance) == (2, 8)
    finish(instance)


def test_confirmed_blocks_count_during_another_read() -> None:
    """If the worker dies during a read, that read's blocks are free once the copy has ended, not before."""
    instance = keeps(2)
    fetch = fetch_of(read(instance, 2, num_confirmed=2, stage=1))
    assert adopt(instance) == (2, 8)
    assert instance.state.memory.host.num_free_blocks == 14
    instance.handle(CopyFailed(fetch.copy_id), 1.0)
    finish(instance)


def test_a_read_that_failed_costs_only_itself() -> None:
    """If a worker dies during a read, the blocks confirmed before are still usable."""
    instance = keeps(2)
    fetch = fetch_of(read(instance, 2, num_confirmed=2, stage=1))
    assert told(instance.handle(CopyFailed(fetch.copy_id), 0.0), S) == [Declined(N, DeclineReason.UNREACHABLE)]
    assert instance.state.memory.num_checkpoint_blocks == 2
    instance.handle(PeerDown(S), 0.5)
    assert adopt(instance) == (2, 8)
    finish(instance)


def test_a_gateway_without_the_newest_tokens_goes_on_from_its_own() -> None:
    """Only blocks of tokens that the gateway has are used, and one token is left to feed."""
    for num_tokens, num_blocks in ((13, 3), (12, 2), (11, 2)):
        instance = keeps(4)
        assert adopt(instance, PROMPT[:num_tokens]) == (num_blocks, 4 * num_blocks)
        finish(instance)


def test_checkpoints_of_other_tokens_are_not_used() -> None:
    """If the request has other tokens than its checkpoints, they are freed and all KV is computed again."""
    instance = keeps()
    assert adopt(instance, (*PROMPT[:5], 29, *PROMPT[6:18])) == (0, 0)
    finish(instance)


def test_unconfirmed_checkpoints_are_not_used() -> None:
    """Blocks that the source has not confirmed may hold anything."""
    instance = holder()
    fetch = fetch_of(read(instance, 3))
    instance.handle(CopyDone(fetch.copy_id, 0.01), 0.0)
    assert adopt(instance) == (0, 0)
    finish(instance)


def test_a_dead_workers_checkpoints_are_kept_for_a_while() -> None:
    """Gateways that notice the death later still find them for ten seconds."""
    instance = keeps()
    instance.handle(PeerDown(S), 1.0)
    instance.handle(Tick(), 10.9)
    assert adopt(instance, now=10.9) == (3, 12)
    finish(instance)
    instance = keeps()
    instance.handle(PeerDown(S), 1.0)
    assert instance.state.checkpoint_store.next_deadline() == 11.0
    assert told(instance.handle(Tick(), 11.0), S) == []
    assert_keeps_nothing(instance)


def test_a_dead_gateways_checkpoints_are_dropped() -> None:
    """Only that gateway could use them. During a read, the blocks are free once the copy has ended."""
    instance = keeps()
    fetch = fetch_of(read(instance, 1, num_confirmed=3, stage=1))
    instance.handle(PeerDown(GATEWAY), 1.0)
    assert not instance.state.checkpoint_store
    assert instance.handle(CopyDone(fetch.copy_id, 0.01), 1.0) == []
    assert_keeps_nothing(instance)


def test_withdrawn_ends_it() -> None:
    """All blocks are freed at once, and other transfers and other workers' checkpoints stay."""
    instance = keeps()
    instance.handle(Withdrawn(NEXT), 1.0, S)
    instance.handle(Withdrawn(N), 1.0, E)
    assert len(instance.state.checkpoint_store) == 1
    instance.handle(Withdrawn(N), 1.0, S)
    assert_keeps_nothing(instance)


def test_a_read_that_is_withdrawn_is_cancelled() -> None:
    """Its blocks are the checkpoints' until the copy has ended."""
    instance = holder()
    fetch = fetch_of(read(instance, 3))
    assert instance.handle(Withdrawn(N), 0.0, S) == [CancelFetch(fetch.copy_id)]
    assert instance.state.memory.num_checkpoint_blocks == 3
    instance.handle(CopyFailed(fetch.copy_id), 0.0)
    assert_keeps_nothing(instance)


def test_a_lost_withdrawal_is_asked_for() -> None:
    """After ten silent seconds the holder asks the source, and without an answer frees all blocks."""
    instance = keeps()
    assert instance.state.checkpoint_store.next_deadline() == 10.0
    assert told(instance.handle(Tick(), 10.0), S) == [Copied(N, 0)]
    instance.handle(CheckpointConfirmed(N, 0), 11.0, S)
    assert told(instance.handle(Tick(), 21.0), S) == [Copied(N, 0)]
    assert len(instance.state.checkpoint_store) == 1
    assert told(instance.handle(Tick(), 31.0), S) == []
    assert_keeps_nothing(instance)


def test_a_confirmation_that_was_lost_comes_with_the_next_read() -> None:
    """The source's count of confirmed blocks decides."""
    instance = holder()
    fetch = fetch_of(read(instance, 2))
    instance.handle(CopyDone(fetch.copy_id, 0.01), 0.0)
    fetch = fetch_of(read(instance, 1, num_confirmed=2, stage=1))
    assert len(fetch.blocks) == 1
    assert adopt(instance) == (2, 8)
    instance.handle(CopyDone(fetch.copy_id, 0.01), 1.0)
    finish(instance)


def test_a_void_read_is_repeated() -> None:
    """If the source counts fewer confirmed blocks than were read, the rest is freed and read again."""
    instance = keeps(1)
    instance.handle(CopyDone(fetch_of(read(instance, 3, num_confirmed=1, stage=1)).copy_id, 0.01), 0.0)
    instance.handle(CopyDone(fetch_of(read(instance, 2, num_confirmed=1, stage=2)).copy_id, 0.01), 0.0)
    assert instance.state.memory.num_checkpoint_blocks == 3
    instance.handle(CheckpointConfirmed(N, 2), 0.0, S)
    assert adopt(instance) == (3, 12)
    finish(instance)


def test_a_confirmation_of_another_stage_is_ignored() -> None:
    """Only the last stage can be confirmed, and only after its read."""
    instance = keeps(1)
    fetch = fetch_of(read(instance, 2, num_confirmed=1, stage=1))
    instance.handle(CheckpointConfirmed(N, 1), 0.0, S)
    instance.handle(CopyDone(fetch.copy_id, 0.01), 0.0)
    instance.handle(CheckpointConfirmed(N, 0), 0.0, S)
    assert adopt(instance) == (1, 4)
    finish(instance)


def test_a_repeated_read_is_answered_again() -> None:
    """The same Checkpoint gets the same Copied again, but no answer during the read."""
    instance = holder()
    fetch = fetch_of(read(instance, 2))
    assert read(instance, 2) == []
    instance.handle(CopyDone(fetch.copy_id, 0.01), 0.0)
    assert read(instance, 2) == [Send(S, Copied(N, 0))]
    instance.handle(CheckpointConfirmed(N, 0), 0.0, S)
    assert read(instance, 2) == [Send(S, Copied(N, 0))]
    assert adopt(instance) == (2, 8)


def test_a_failed_read_that_is_repeated_is_read_again() -> None:
    """If the Declined was lost, the repeated Checkpoint is read again and not answered as copied."""
    instance = keeps(2)
    fetch = fetch_of(read(instance, 2, num_confirmed=2, stage=1))
    instance.handle(CopyFailed(fetch.copy_id), 0.0)
    again = fetch_of(read(instance, 2, num_confirmed=2, stage=1))
    assert again.ticket == fetch.ticket
    assert instance.handle(CopyDone(again.copy_id, 0.01), 0.0) == [Send(S, Copied(N, 1))]
    instance.handle(CheckpointConfirmed(N, 1), 0.0, S)
    assert adopt(instance) == (4, 16)


def test_half_of_the_hosts_pool_is_left_to_swapping() -> None:
    """A read that would need more is declined, and confirmed blocks stay."""
    instance = keeps(3, num_host_blocks=8)
    assert read(instance, 2, num_confirmed=3, stage=1) == [Send(S, Declined(N, DeclineReason.NO_BLOCKS))]
    assert read(instance, 1, transfer=NEXT) != [Send(S, Declined(NEXT, DeclineReason.NO_BLOCKS))]
    assert read(instance, 1, transfer=THIRD) == [Send(S, Declined(THIRD, DeclineReason.NO_BLOCKS))]
    assert len(instance.state.checkpoint_store) == 2
    assert adopt(instance) == (3, 12)


@pytest.mark.parametrize("num_host_blocks", [0, 1])
def test_without_a_pool_on_the_host_everything_is_declined(num_host_blocks: int) -> None:
    """A worker with such a holder goes on without checkpoints."""
    instance = holder(num_host_blocks)
    assert read(instance, 1) == [Send(S, Declined(N, DeclineReason.NO_BLOCKS))]
    assert_keeps_nothing(instance)


@pytest.mark.parametrize(
    ("num_confirmed", "num_blocks", "num_tokens"),
    [(4, 1, 4), (2, 1, 4), (2**62, 1, 4), (3, 0, 0), (3, 1, 3), (3, 1, 5), (3, 1, 0), (-1, 1, 4)],
)
def test_numbers_that_make_no_sense_end_it(num_confirmed: int, num_blocks: int, num_tokens: int) -> None:
    """Wrong counts of confirmed blocks, blocks or tokens are declined, and the transfer's blocks are freed."""
    instance = keeps(3)
    blocks = ticket(N, 1, *range(num_blocks))
    message = Checkpoint("r", GATEWAY, num_confirmed, (1,) * num_tokens, blocks)
    assert instance.handle(message, 0.0, S) == [Send(S, Declined(N, DeclineReason.UNKNOWN))]
    assert_keeps_nothing(instance)


def test_an_unknown_transfer_is_declined() -> None:
    """A holder that has lost confirmed blocks says so, and the source begins again."""
    instance = holder()
    assert read(instance, 1, num_confirmed=2, stage=3) == [Send(S, Declined(N, DeclineReason.UNKNOWN))]
    instance.handle(CheckpointConfirmed(N, 0), 0.0, S)
    assert_keeps_nothing(instance)


def test_an_unknown_worker_is_declined() -> None:
    """Its KV cannot be read from here."""
    instance = holder()
    message = Checkpoint("r", GATEWAY, 0, PROMPT[:4], ticket(N, 0, 1))
    assert instance.handle(message, 0.0, E) == [Send(E, Declined(N, DeclineReason.UNREACHABLE))]
    assert_keeps_nothing(instance)


def test_a_draining_holder_keeps_nothing() -> None:
    """It frees all checkpoints, accepts none, and does not wait for them."""
    instance = keeps()
    instance.handle(Drain(), 1.0)
    assert_keeps_nothing(instance)
    assert read(instance, 1) == [Send(S, Declined(N, DeclineReason.DRAINING))]
    assert_keeps_nothing(instance)


def test_a_scored_prompt_without_output_is_computed_again() -> None:
    """A worker computes the whole prompt although it holds a checkpoint, because log-probabilities come from computing;
    the checkpoint's blocks are free again.
    """
    instance = keeps()
    request = spec("r", 18, 12, prompt_logprobs=0)
    assert request.prompt_token_ids == PROMPT[:18]
    effects = instance.handle(Start(2, request, Attained(), Transfer(S, N)), 1.0)
    assert not any(isinstance(effect, SwapIn) for effect in effects)
    assert instance.plan is not None
    assert instance.plan.starts == (0,)
    assert not instance.state.checkpoint_store
    instance.handle(Release("r", 2), 1.0)
    instance.done(now=1.0)
    assert_keeps_nothing(instance)
