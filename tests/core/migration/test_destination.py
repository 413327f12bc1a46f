"""Scenarios of a migration's destination: what it reserves, copies, adopts and lets go."""

from dataclasses import replace

import pytest

from actorserve.core.effects import AddToEngine, Fetch, Send
from actorserve.core.messages import (
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
from tests.core.harness.destination import (
    ACCESS,
    DESTINATION,
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
from tests.core.harness.driver import GATEWAY, migration_id, spec

# --- how it goes where nothing goes wrong ----------------------------------------------------------------------------


def test_stage_by_stage_it_comes_here() -> None:
    """Blocks for all tokens are reserved, each stage is copied, and the request goes on behind that when it starts."""
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
    assert instance.state.requests["r"].token_ids[-2:] == [7, 6]
    instance.handle(Release("r", 2))
    instance.done()
    assert_holds_nothing(instance)


def test_what_lies_here_already_is_not_copied() -> None:
    """The prefix that another request left in the cache is skipped, and shared."""
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


def test_where_all_lies_here_nothing_is_copied() -> None:
    """A stage of which every block was found is answered at once."""
    instance = destination()
    instance.start(spec("before", 8, 5))
    instance.done()
    instance.handle(Release("before", 1))
    instance.done()
    assert instance.handle(offer(), 0.0, S) == [Send(S, Copied(migration_id(), 0))]
    assert instance.state.next_deadline() is not None


def test_nobody_shares_what_was_not_handed_over() -> None:
    """What is being copied, or lies here whole, is found in the prefix cache only once its request is here."""
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


def test_what_is_copied_belongs_to_nobody_else() -> None:
    """While r comes, requests here get other blocks, and never r's."""
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


def test_what_has_run_keeps_a_block_for_each() -> None:
    """A request comes only where it leaves a block for each that runs: else it would have somebody sent away."""
    for num_others, comes in ((1, True), (3, False)):
        instance = destination(num_blocks=8, prefix_cache=False)
        for number in range(num_others):
            instance.start(spec(f"n{number}", 3 if comes else 4, 20))
        while not all(request.num_output for request in instance.state.requests.values()):
            instance.done()
        effects = instance.handle(WHOLE, 0.0, S)
        assert bool(instance.state.migration_destination) is comes
        assert (effects == [Send(S, Declined(migration_id(), DeclineReason.NO_BLOCKS))]) is not comes


# --- no ---------------------------------------------------------------------------------------------------------------


def test_without_room_nothing_is_held() -> None:
    """A request for which too few blocks are free is declined, and what is free stays free."""
    instance = destination()
    instance.start(spec("big", 50, 10))
    used = num_used(instance)
    assert used == 13
    long = replace(spec("r", 20, 40), output_token_ids=(9,))
    effects = instance.handle(offer(long, 20, 1, 2, 3, 4, 5), 0.0, S)
    assert effects == [Send(S, Declined(migration_id(), DeclineReason.NO_BLOCKS))]
    assert num_used(instance) == used
    assert not instance.state.migration_destination


def test_a_stage_without_room_gives_back_what_was_reserved() -> None:
    """Where blocks for what was made since are not free, all of it is let go."""
    instance = destination(num_blocks=5, max_context_tokens=20)
    copied(instance, fetch_of(instance.handle(offer(), 0.0, S)))
    instance.handle(Start(1, spec("other", 7, 10)))
    assert num_used(instance) == 5
    effects = instance.handle(Stage((7, 7, 7), 12, ticket(1, 42), True), 0.0, S)
    assert effects == [Send(S, Declined(migration_id(), DeclineReason.NO_BLOCKS))]
    assert num_used(instance) == 2
    assert not instance.state.migration_destination


def test_one_that_is_full_already_is_declined() -> None:
    """A request that could make no further token here does not come."""
    instance = destination(max_context_tokens=10)
    assert instance.handle(WHOLE, 0.0, S) == [Send(S, Declined(migration_id(), DeclineReason.NO_BLOCKS))]
    instance = destination(max_context_tokens=11)
    copied(instance, fetch_of(instance.handle(offer(), 0.0, S)))
    effects = instance.handle(Stage((7,), 10, ticket(1, 42), True), 0.0, S)
    assert effects == [Send(S, Declined(migration_id(), DeclineReason.NO_BLOCKS))]
    assert_holds_nothing(instance)


def test_a_draining_instance_takes_nobody() -> None:
    """What comes is declined, and so is what was on its way; a request handed over all the same is refused."""
    instance = destination()
    instance.start(spec("runs", 4, 50))  # so that it does not end at once
    first = fetch_of(instance.handle(WHOLE, 0.0, S))
    effects = instance.handle(Drain())
    assert Send(S, Declined(migration_id(), DeclineReason.DRAINING)) in effects
    second = replace(WHOLE, ticket=ticket(0, 40, 41, 42, number=2))
    assert instance.handle(second, 0.0, S) == [Send(S, Declined(migration_id(2), DeclineReason.DRAINING))]
    assert copied(instance, first) == []
    effects = instance.handle(Start(2, MOVED, transfer=Transfer(S, migration_id())))
    assert effects == [Send(GATEWAY, Refused("r", 2, RefusalReason.DRAINING, retry_after_s=DESTINATION.retry_s))]
    instance.handle(Release("runs", 1))
    instance.done()
    assert_holds_nothing(instance)


def test_whose_kv_cannot_be_read_is_declined() -> None:
    """A worker that is not up here, or that did not say how its KV is read, is told so."""
    instance = destination()
    instance.handle(PeerUp(STRANGER, Role.WORKER))
    for source in (STRANGER, Peer("nobody", 1)):
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
def test_given_up_while_it_is_copied(why: Message, outcome: Message) -> None:
    """The blocks that the copy writes are free only once it is done, or failed; nobody is told of that."""
    instance = destination()
    fetch = fetch_of(instance.handle(WHOLE, 0.0, S))
    instance.handle(why, 0.0, S)
    assert not instance.state.migration_destination
    assert num_used(instance) == len(fetch.blocks) == 3
    assert instance.handle(outcome) == []
    assert_holds_nothing(instance)


def test_blocks_that_are_not_copied_are_free_at_once() -> None:
    """Of a request given up in the middle of a stage only that stage's blocks are held until the copy is done."""
    instance = destination()
    copied(instance, fetch_of(instance.handle(offer(), 0.0, S)))
    fetch = fetch_of(instance.handle(Stage((7, 7, 7), 12, ticket(1, 42), True), 0.0, S))
    instance.handle(Withdrawn(migration_id()), 0.0, S)
    assert num_used(instance) == len(fetch.blocks) == 1
    copied(instance, fetch)
    assert_holds_nothing(instance)


def test_a_copy_that_fails_is_declined() -> None:
    """The source hears that its KV could not be read, and nothing is held."""
    instance = destination()
    fetch = fetch_of(instance.handle(WHOLE, 0.0, S))
    assert instance.handle(CopyFailed(fetch.copy_id)) == [Send(S, Declined(migration_id(), DeclineReason.UNREACHABLE))]
    assert_holds_nothing(instance)


@pytest.mark.parametrize("why", [Withdrawn(migration_id()), PeerDown(GATEWAY)], ids=["withdrawn", "gateway dies"])
def test_given_up_when_it_lies_here_whole(why: Message) -> None:
    """Its blocks are free at once; handed over all the same, it is computed anew."""
    instance = with_copy()
    instance.handle(why, 0.0, S)
    assert_holds_nothing(instance)
    assert not adopted(instance)


def test_a_whole_copy_outlives_its_source() -> None:
    """It may just have been handed over; if it is not, its time ends."""
    instance = with_copy()
    instance.handle(PeerDown(S))
    assert adopted(instance)
    instance = with_copy()
    instance.handle(PeerDown(S))
    instance.handle(Tick(), 2 * TIMEOUT_S)
    assert_holds_nothing(instance)


def test_a_part_does_not_outlive_its_source() -> None:
    """What is copied of a request that still decodes is of no use without the rest."""
    instance = destination()
    copied(instance, fetch_of(instance.handle(offer(), 0.0, S)))
    assert num_used(instance) == 3
    instance.handle(PeerDown(S))
    assert_holds_nothing(instance)


def test_a_copy_that_nobody_claims_has_its_time() -> None:
    """The source is told, and what follows finds nothing."""
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
    """The source is told; the blocks are free once the copy writes no more, and not before."""
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


def test_the_newer_life_of_a_source_knows_nothing_of_the_old_ones() -> None:
    """What the old incarnation offered is not the new one's, whatever its numbers."""
    instance = with_copy()
    reborn = Peer(S.name, 2)
    instance.handle(PeerDown(S))
    instance.handle(PeerUp(reborn, Role.WORKER, kv=ACCESS))
    instance.handle(Withdrawn(migration_id()), 0.0, reborn)
    assert len(instance.state.migration_destination) == 1
    effects = instance.handle(Start(2, MOVED, transfer=Transfer(reborn, migration_id())))
    assert Send(GATEWAY, Started("r", 2)) in effects
    assert instance.plan is not None
    assert instance.plan.starts == (0,)


# --- handed over -----------------------------------------------------------------------------------------------------


def test_a_request_with_other_tokens_than_were_copied_is_computed_anew() -> None:
    """The gateway's tokens are what counts: a copy of others is dropped."""
    for output in ((9,), (9, 8, 7), (9, 7)):
        instance = with_copy()
        instance.handle(Start(2, replace(MOVED, output_token_ids=output), transfer=Transfer(S, migration_id())))
        assert not instance.state.migration_destination
        assert instance.plan is not None
        assert instance.plan.starts == (0,)
        assert len(instance.plan.token_ids[0]) == 8 + len(output)


def test_handed_over_before_all_is_copied_it_is_computed_anew() -> None:
    """What comes while the last stage, or any before it, is under way waits for no copy; that ends by itself."""
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
    """It adopts once."""
    instance = with_copy()
    assert adopted(instance)
    assert instance.handle(Start(2, MOVED, transfer=Transfer(S, migration_id()))) == [Send(GATEWAY, Started("r", 2))]


def test_it_comes_back_while_its_old_epoch_is_still_here() -> None:
    """An old epoch that was never released makes way, and the new one takes the copy."""
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


def test_after_the_start_nothing_that_its_source_says_matters() -> None:
    """A late withdrawal, stage or death is not the request's any more."""
    instance = with_copy()
    assert adopted(instance)
    instance.handle(Withdrawn(migration_id()), 0.0, S)
    assert instance.handle(Stage((7,), 10, ticket(1, 43), True), 0.0, S) == [
        Send(S, Declined(migration_id(), DeclineReason.UNKNOWN))
    ]
    instance.handle(PeerDown(S))
    instance.done()
    assert instance.state.requests["r"].num_output == 3
