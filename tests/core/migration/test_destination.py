"""Scenarios of a migration's destination: what it reserves, copies, adopts and frees."""

from dataclasses import replace

import pytest

from actorserve.core.effects import AddToEngine, CancelFetch, Fetch, Send
from actorserve.core.kv.layer_groups import LayerGroups, Rows
from actorserve.core.messages import (
    NOTHING_SPENT,
    Copied,
    CopyDone,
    CopyFailed,
    Declined,
    DeclineReason,
    Drain,
    Message,
    Peer,
    PeerDown,
    PeerUp,
    RefusalReason,
    Refused,
    Release,
    Role,
    Stage,
    Start,
    Started,
    Tick,
    Transfer,
    Withdrawn,
)
from actorserve.core.scheduling.policy import FirstComeFirstServed
from tests.core.harness.destination import (
    ACCESS,
    DESTINATION,
    INFO,
    MOVED,
    STRANGER,
    TIMEOUT_S,
    WHOLE,
    S,
    adopted,
    assert_holds_nothing,
    copied,
    destination,
    fetch_of,
    num_used,
    offer,
    ticket,
    with_copy,
)
from tests.core.harness.driver import GATEWAY, Instance, migration_id, spec

# --- without failures ------------------------------------------------------------------------------------------------


def test_a_request_comes_stage_by_stage() -> None:
    """Blocks for all tokens are reserved, each stage is copied, and the request goes on behind the copied KV."""
    instance = destination()
    effects = instance.handle(offer(), 0.0, S)
    first = fetch_of(effects)
    assert effects == [Fetch(1, S, ACCESS, ticket(0, 40, 41), 0, first.blocks, False)]
    assert (len(first.blocks), num_used(instance)) == (2, 3)
    assert copied(instance, first) == [Send(S, Copied(migration_id(), 0))]
    effects = instance.handle(Stage((7, 7, 7), 12, ticket(1, 42), True), 0.0, S)
    last = fetch_of(effects)
    assert effects == [Fetch(2, S, ACCESS, ticket(1, 42), 0, last.blocks, True)]
    assert (len(last.blocks), num_used(instance)) == (1, 4)
    assert copied(instance, last) == [Send(S, Copied(migration_id(), 1))]
    request = replace(MOVED, output_token_ids=(9, 8, 7, 7, 7))
    effects = instance.handle(Start(2, request, transfer=Transfer(S, migration_id())))
    assert effects[:2] == [Send(GATEWAY, Started("r", 2)), AddToEngine(request)]
    assert instance.plan is not None
    assert (instance.plan.starts, instance.plan.token_ids) == ((12,), ((7,),))
    assert instance.plan.block_tables[0][:3] == (*first.blocks, *last.blocks)
    instance.done(token=6)
    assert list(instance.state.requests["r"].token_ids[-2:]) == [7, 6]
    instance.handle(Release("r", 2))
    instance.done()
    assert_holds_nothing(instance)


def test_cached_blocks_are_not_copied() -> None:
    """A prefix that another request left in the cache is not copied, but shared."""
    instance = destination()
    instance.start(spec("before", 8, 5))
    instance.done()
    [block] = instance.state.requests["before"].blocks[:1]
    instance.handle(Release("before", 1))
    instance.done()
    fetch = fetch_of(instance.handle(WHOLE, 0.0, S))
    assert fetch.num_skipped == 2
    assert (fetch.ticket.blocks, len(fetch.blocks)) == ((40, 41, 42), 1)
    copied(instance, fetch)
    assert adopted(instance)
    assert instance.state.requests["r"].blocks[0] == block


def test_a_fully_cached_stage_copies_nothing() -> None:
    """If the prefix cache has every block of a stage, the stage is answered at once."""
    instance = destination()
    instance.start(spec("before", 8, 5))
    instance.done()
    instance.handle(Release("before", 1))
    instance.done()
    assert instance.handle(offer(), 0.0, S) == [Send(S, Copied(migration_id(), 0))]
    assert instance.state.next_deadline() is not None


def test_blocks_are_not_shared_before_the_hand_over() -> None:
    """The prefix cache finds blocks of an incoming request only after that request has started here."""
    instance = with_copy()
    instance.start(replace(spec("like", 8, 40), output_token_ids=(9, 8)))
    assert instance.plan is not None
    assert instance.plan.starts == (0,)
    instance.handle(Release("like", 1))
    other = with_copy()
    assert adopted(other)
    other.start(replace(spec("like", 8, 40), output_token_ids=(9, 8)))
    other.done()
    assert other.plan is not None
    assert other.plan.starts[other.plan.request_ids.index("like")] == 8


def test_reserved_blocks_go_to_no_other_request() -> None:
    """While r is being copied, requests that run here never get its blocks."""
    instance = destination()
    fetch = fetch_of(instance.handle(WHOLE, 0.0, S))
    for number in range(4):
        instance.start(replace(spec(f"n{number}", 9, 20), cache_salt=str(number)))
    for _ in range(20):
        assert instance.plan is not None
        assert not {block for table in instance.plan.block_tables for block in table} & set(fetch.blocks)
        instance.done()
    copied(instance, fetch)
    assert instance.plan is not None
    assert not {block for table in instance.plan.block_tables for block in table} & set(fetch.blocks)


def test_each_running_request_keeps_a_free_block() -> None:
    """A request is accepted only if one block stays free for each running request, because growth would preempt one."""
    for num_others, comes in ((1, True), (3, False)):
        instance = destination(num_blocks=8, prefix_cache=False)
        for number in range(num_others):
            instance.start(spec(f"n{number}", 3 if comes else 4, 20))
        while not all(request.num_output for request in instance.state.requests.values()):
            instance.done()
        effects = instance.handle(WHOLE, 0.0, S)
        assert bool(instance.state.migration_destination) is comes
        assert (effects == [Send(S, Declined(migration_id(), DeclineReason.NO_BLOCKS))]) is not comes


@pytest.mark.parametrize(("num_free", "comes"), [(18, False), (19, True)])
def test_a_prefill_takes_back_what_its_window_gave_up(num_free: int, comes: bool) -> None:
    """A request is accepted only if all blocks stay free that a running prefill lacks for the rest of its prompt."""
    instance = destination(
        num_blocks=93 + num_free,
        max_context_tokens=400,
        max_batch_tokens=16,
        prefix_cache=False,
        layer_groups=LayerGroups(1, 2, window=8),
    )
    instance.start(spec("long", 300, 4))
    for _ in range(2):
        instance.done()
    memory, (long,) = instance.state.memory, instance.state.requests.values()
    assert (memory.device.num_free_blocks, memory.num_missing(long)) == (num_free, 10)
    instance.handle(offer(MOVED, 9, *range(9), is_last=True), 0.0, S)
    assert bool(instance.state.migration_destination) is comes


@pytest.mark.parametrize(("is_short", "comes"), [(True, False), (False, True)])
def test_a_whole_output_is_reserved_beside_windows(is_short: bool, comes: bool) -> None:
    """If the policy reserves outputs, the blocks must be free that a request may hold, with its windows."""
    groups = LayerGroups(1, 2, window=8)
    config = replace(DESTINATION, max_context_tokens=400, max_batch_tokens=16, layer_groups=groups)
    num_final = Rows(groups, 4, 16).shape.num_blocks(60)
    config = replace(config, num_blocks=num_final + 10)
    instance = Instance(config, FirstComeFirstServed(reserves_output=True))
    instance.handle(PeerUp(S, Role.WORKER, INFO))
    memory = instance.state.memory
    assert memory.device.allocate(11 if is_short else 10) is not None
    moved = replace(spec("r", 200, 40), output_token_ids=(9, 8))
    num_blocks = memory.rows.count(0, 51, memory.first_seen(201), 51)
    effects = instance.state.handle(offer(moved, 201, *range(num_blocks), is_last=True), 0.0, S)
    assert bool(instance.state.migration_destination) is comes
    assert comes is not (Send(S, Declined(migration_id(), DeclineReason.NO_BLOCKS)) in effects)


# --- declines
# -----------------------------------------------------------------------------------------------------------


def test_without_room_nothing_is_held() -> None:
    """A request that needs more blocks than are free is declined, and the free blocks stay free."""
    instance = destination()
    instance.start(spec("big", 50, 10))
    used = num_used(instance)
    assert used == 13
    long = replace(spec("r", 20, 40), output_token_ids=(9,))
    effects = instance.handle(offer(long, 20, 1, 2, 3, 4, 5), 0.0, S)
    assert effects == [Send(S, Declined(migration_id(), DeclineReason.NO_BLOCKS))]
    assert num_used(instance) == used
    assert not instance.state.migration_destination


def test_a_stage_without_room_frees_the_reservation() -> None:
    """If too few blocks are free for a later stage, all of the request's blocks are freed."""
    instance = destination(num_blocks=5, max_context_tokens=20)
    copied(instance, fetch_of(instance.handle(offer(), 0.0, S)))
    instance.handle(Start(1, spec("other", 7, 10)))
    assert num_used(instance) == 5
    effects = instance.handle(Stage((7, 7, 7), 12, ticket(1, 42), True), 0.0, S)
    assert effects == [Send(S, Declined(migration_id(), DeclineReason.NO_BLOCKS))]
    assert num_used(instance) == 2
    assert not instance.state.migration_destination


def test_a_request_at_the_context_limit_is_declined() -> None:
    """A request that could make no further token here is not accepted."""
    instance = destination(max_context_tokens=10)
    assert instance.handle(WHOLE, 0.0, S) == [Send(S, Declined(migration_id(), DeclineReason.NO_BLOCKS))]
    instance = destination(max_context_tokens=11)
    copied(instance, fetch_of(instance.handle(offer(), 0.0, S)))
    effects = instance.handle(Stage((7,), 10, ticket(1, 42), True), 0.0, S)
    assert effects == [Send(S, Declined(migration_id(), DeclineReason.NO_BLOCKS))]
    assert_holds_nothing(instance)


def test_a_draining_instance_accepts_nothing() -> None:
    """Offers and migrations in flight are declined, and a request that is handed over nevertheless is refused."""
    instance = destination()
    instance.start(spec("runs", 4, 50))  # so that the drain does not end at once
    first = fetch_of(instance.handle(WHOLE, 0.0, S))
    effects = instance.handle(Drain())
    assert Send(S, Declined(migration_id(), DeclineReason.DRAINING)) in effects
    second = replace(WHOLE, ticket=ticket(0, 40, 41, 42, number=2))
    assert instance.handle(second, 0.0, S) == [Send(S, Declined(migration_id(2), DeclineReason.DRAINING))]
    assert copied(instance, first) == []
    effects = instance.handle(Start(2, MOVED, transfer=Transfer(S, migration_id())))
    refused = Refused("r", 2, RefusalReason.DRAINING, retry_after_s=DESTINATION.retry_s, energy=NOTHING_SPENT)
    assert effects == [Send(GATEWAY, refused)]
    instance.handle(Release("runs", 1))
    instance.done()
    assert_holds_nothing(instance)


def test_an_unreadable_source_is_declined() -> None:
    """A worker that this instance has not met, or that did not say how to read its KV, gets UNREACHABLE."""
    instance = destination()
    instance.handle(PeerUp(STRANGER, Role.WORKER))
    for source in (STRANGER, Peer("unknown", 1)):
        assert instance.handle(WHOLE, 0.0, source) == [
            Send(source, Declined(migration_id(), DeclineReason.UNREACHABLE))
        ]
    assert_holds_nothing(instance)


# --- given up --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "why",
    [Withdrawn(migration_id()), PeerDown(S), PeerDown(GATEWAY), Drain()],
    ids=["withdrawn", "source dies", "gateway dies", "drains"],
)
@pytest.mark.parametrize("outcome", [CopyDone(1, 0.01), CopyFailed(1)], ids=["done", "failed"])
def test_a_migration_ends_during_a_copy(why: Message, outcome: Message) -> None:
    """The copy is cancelled. The blocks that it writes are free once it has succeeded or failed, and count as reserved
    until then; no message follows.
    """
    instance = destination()
    fetch = fetch_of(instance.handle(WHOLE, 0.0, S))
    assert CancelFetch(fetch.copy_id) in instance.handle(why, 0.0, S)
    assert not len(instance.state.migration_destination)
    assert num_used(instance) == len(fetch.blocks) == instance.state.migration_destination.num_blocks == 3
    assert instance.handle(outcome) == []
    assert_holds_nothing(instance)


def test_blocks_that_are_not_copied_are_free_at_once() -> None:
    """When a migration ends during a stage, only that stage's blocks stay in use until the copy is done."""
    instance = destination()
    copied(instance, fetch_of(instance.handle(offer(), 0.0, S)))
    fetch = fetch_of(instance.handle(Stage((7, 7, 7), 12, ticket(1, 42), True), 0.0, S))
    assert instance.handle(Withdrawn(migration_id()), 0.0, S) == [CancelFetch(fetch.copy_id)]
    assert num_used(instance) == len(fetch.blocks) == 1
    copied(instance, fetch)
    assert_holds_nothing(instance)


def test_a_copy_that_fails_is_declined() -> None:
    """The source hears that reading its KV failed, and all blocks are free."""
    instance = destination()
    fetch = fetch_of(instance.handle(WHOLE, 0.0, S))
    assert instance.handle(CopyFailed(fetch.copy_id)) == [Send(S, Declined(migration_id(), DeclineReason.UNREACHABLE))]
    assert_holds_nothing(instance)


@pytest.mark.parametrize("why", [Withdrawn(migration_id()), PeerDown(GATEWAY)], ids=["withdrawn", "gateway dies"])
def test_a_migration_ends_after_the_last_copy(why: Message) -> None:
    """Its blocks are free at once. If the request is handed over nevertheless, its KV is computed again."""
    instance = with_copy()
    instance.handle(why, 0.0, S)
    assert_holds_nothing(instance)
    assert not adopted(instance)


def test_a_whole_copy_outlives_its_source() -> None:
    """The request may just have been handed over. If it was not, the copy ends at its deadline."""
    instance = with_copy()
    instance.handle(PeerDown(S))
    assert adopted(instance)
    instance = with_copy()
    instance.handle(PeerDown(S))
    instance.handle(Tick(), 2 * TIMEOUT_S)
    assert_holds_nothing(instance)


def test_a_part_does_not_outlive_its_source() -> None:
    """A partial copy is freed when its source dies, because it is of no use without the rest."""
    instance = destination()
    copied(instance, fetch_of(instance.handle(offer(), 0.0, S)))
    assert num_used(instance) == 3
    instance.handle(PeerDown(S))
    assert_holds_nothing(instance)


def test_an_unclaimed_copy_times_out() -> None:
    """The source is told, and later messages about the transfer find nothing."""
    instance = destination()
    instance.handle(PeerDown(GATEWAY))  # so that no load report is due
    instance.handle(PeerUp(GATEWAY, Role.COORDINATOR))
    fetch = fetch_of(instance.handle(WHOLE, 1000.0, S))
    copied(instance, fetch, now=1000.0)
    assert Send(S, Declined(migration_id(), DeclineReason.UNKNOWN)) not in instance.handle(
        Tick(), 1000.0 + 2 * TIMEOUT_S - 0.01
    )
    assert Send(S, Declined(migration_id(), DeclineReason.UNKNOWN)) in instance.handle(Tick(), 1000.0 + 2 * TIMEOUT_S)
    assert_holds_nothing(instance)
    assert not adopted(instance)


def test_a_copy_that_does_not_end_is_given_up() -> None:
    """The source is told. The blocks are free once the copy has ended, and not before."""
    instance = destination()
    instance.handle(PeerDown(GATEWAY))
    instance.handle(PeerUp(GATEWAY, Role.COORDINATOR))
    fetch = fetch_of(instance.handle(WHOLE, 1000.0, S))
    assert Send(S, Declined(migration_id(), DeclineReason.UNKNOWN)) in instance.handle(
        Tick(), 1000.0 + 2 * TIMEOUT_S + 1.0
    )
    assert not instance.state.migration_destination
    free = instance.state.memory.device.num_free_blocks
    instance.handle(CopyDone(fetch.copy_id, 9.0), 1010.0)
    assert instance.state.memory.device.num_free_blocks == free + len(fetch.blocks)
    assert_holds_nothing(instance)


def test_a_new_incarnation_of_the_source_has_transfers_of_its_own() -> None:
    """Transfers of the old incarnation are unknown to the new one, even under equal numbers."""
    instance = with_copy()
    reborn = Peer(S.name, 2)
    instance.handle(PeerDown(S))
    instance.handle(PeerUp(reborn, Role.WORKER, INFO))
    instance.handle(Withdrawn(migration_id()), 0.0, reborn)
    assert len(instance.state.migration_destination) == 1
    effects = instance.handle(Start(2, MOVED, transfer=Transfer(reborn, migration_id())))
    assert Send(GATEWAY, Started("r", 2)) in effects
    assert instance.plan is not None
    assert instance.plan.starts == (0,)


# --- handed over -----------------------------------------------------------------------------------------------------


def test_a_copy_with_other_tokens_is_not_used() -> None:
    """The gateway's tokens decide: a copy of other tokens is freed, and the KV is computed again."""
    for output in ((9,), (9, 8, 7), (9, 7)):
        instance = with_copy()
        instance.handle(Start(2, replace(MOVED, output_token_ids=output), transfer=Transfer(S, migration_id())))
        assert not instance.state.migration_destination
        assert instance.plan is not None
        assert instance.plan.starts == (0,)
        assert len(instance.plan.token_ids[0]) == 8 + len(output)


def test_a_hand_over_before_the_last_copy_computes_again() -> None:
    """A request that starts during a stage's copy does not wait for it; the copy ends by itself."""
    for message in (offer(), WHOLE):
        instance = destination()
        fetch = fetch_of(instance.handle(message, 0.0, S))
        assert not adopted(instance)
        assert not set(fetch.blocks) & set(instance.state.requests["r"].blocks)
        assert copied(instance, fetch) == []
        instance.handle(Release("r", 2))
        instance.done()
        assert_holds_nothing(instance)
    instance = destination()
    copied(instance, fetch_of(instance.handle(offer(), 0.0, S)))
    assert not adopted(instance)


def test_a_start_that_is_repeated_is_answered_again() -> None:
    """The request adopts its copy once, and the repeated Start is answered."""
    instance = with_copy()
    assert adopted(instance)
    assert instance.handle(Start(2, MOVED, transfer=Transfer(S, migration_id()))) == [Send(GATEWAY, Started("r", 2))]


def test_a_request_returns_while_its_old_epoch_is_still_here() -> None:
    """The new epoch replaces an old one that was never released, and takes the copy."""
    instance = destination(num_blocks=32)
    instance.start(MOVED, epoch=1)
    instance.done()
    fetch = fetch_of(instance.handle(WHOLE, 0.0, S))
    copied(instance, fetch)
    instance.handle(Start(3, MOVED, transfer=Transfer(S, migration_id())))
    assert instance.state.requests["r"].epoch == 3
    assert instance.state.requests["r"].num_computed == 9
    instance.done()
    assert instance.plan is not None
    assert (instance.plan.request_ids, instance.plan.starts) == (("r",), (9,))


def test_after_the_start_the_source_has_no_say() -> None:
    """A late withdrawal, a late stage or the source's death does not affect the started request."""
    instance = with_copy()
    assert adopted(instance)
    instance.handle(Withdrawn(migration_id()), 0.0, S)
    assert instance.handle(Stage((7,), 10, ticket(1, 43), True), 0.0, S) == [
        Send(S, Declined(migration_id(), DeclineReason.UNKNOWN))
    ]
    instance.handle(PeerDown(S))
    instance.done()
    assert instance.state.requests["r"].num_output == 3
