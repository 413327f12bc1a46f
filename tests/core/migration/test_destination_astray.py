"""Scenarios of a migration's destination with late, repeated, reordered or nonsensical messages."""

from dataclasses import replace

import pytest

from actorserve.core.effects import CancelFetch, Send
from actorserve.core.messages import (
    Copied,
    Declined,
    DeclineReason,
    Offer,
    PeerUp,
    Role,
    Stage,
    Tick,
    Transfer,
    Withdrawn,
)
from tests.core.harness.destination import (
    INFO,
    MOVED,
    STRANGER,
    TIMEOUT_S,
    WHOLE,
    S,
    assert_holds_nothing,
    copied,
    destination,
    fetch_of,
    num_used,
    offer,
    ticket,
    with_copy,
)
from tests.core.harness.driver import migration_id


def test_a_repeated_offer_or_stage_reserves_nothing_twice() -> None:
    """A repeated message is not answered while the copy is in flight, and answered again afterwards."""
    instance = destination()
    fetch = fetch_of(instance.handle(offer(), 0.0, S))
    assert instance.handle(offer(), 0.0, S) == []
    copied(instance, fetch)
    assert instance.handle(offer(), 0.0, S) == [Send(S, Copied(migration_id(), 0))]
    stage = Stage((7, 7, 7), 12, ticket(1, 42), True)
    fetch = fetch_of(instance.handle(stage, 0.0, S))
    assert instance.handle(stage, 0.0, S) == []
    assert instance.handle(offer(), 0.0, S) == []
    copied(instance, fetch)
    assert instance.handle(stage, 0.0, S) == [Send(S, Copied(migration_id(), 1))]
    assert num_used(instance) == 4


def test_a_stage_before_its_offer_is_declined_and_the_offer_times_out() -> None:
    """In the wrong order, the stage is declined, and the blocks of the late offer are freed at its deadline."""
    instance = destination()
    stage = Stage((7,), 10, ticket(1, 42), True)
    assert instance.handle(stage, 0.0, S) == [Send(S, Declined(migration_id(), DeclineReason.UNKNOWN))]
    copied(instance, fetch_of(instance.handle(offer(), 0.0, S)))
    deadline_s = 2 * TIMEOUT_S
    assert instance.handle(Tick(), deadline_s - 0.01)[-1:] != [Send(S, Declined(migration_id(), DeclineReason.UNKNOWN))]
    assert Send(S, Declined(migration_id(), DeclineReason.UNKNOWN)) in instance.handle(Tick(), deadline_s)
    assert_holds_nothing(instance)


@pytest.mark.parametrize(
    "stage",
    [
        Stage((7,), 10, ticket(2, 42), True),  # a stage was skipped
        Stage((7,), 10, ticket(1, 42, 43), True),  # more blocks than the tokens take
        Stage((7,), 10, ticket(1), True),  # fewer blocks than the tokens take
        Stage((), 10, ticket(1, 42), True),  # KV for the newest token as well
        Stage((7,), 2**62, ticket(1, 42), True),
        Stage((7,), -1, ticket(1, 42), True),
        Stage((7,) * 500, 9, ticket(1, 42), True),  # more tokens than fit
    ],
)
def test_a_stage_that_makes_no_sense_ends_it(stage: Stage) -> None:
    """It is declined and all blocks are freed; later stages are unknown."""
    instance = destination()
    copied(instance, fetch_of(instance.handle(offer(), 0.0, S)))
    [effect] = instance.handle(stage, 0.0, S)
    assert isinstance(effect, Send)
    assert isinstance(effect.message, Declined)
    assert_holds_nothing(instance)
    follows = Stage((7,), 10, ticket(1, 42), True)
    assert instance.handle(follows, 0.0, S) == [Send(S, Declined(migration_id(), DeclineReason.UNKNOWN))]


def test_a_stage_during_the_copy_before_ends_the_migration() -> None:
    """A source that does not wait for Copied is declined, and the blocks are free once the cancelled copy has ended."""
    instance = destination()
    fetch = fetch_of(instance.handle(offer(), 0.0, S))
    stage = Stage((7,), 10, ticket(1, 42), True)
    declined = Send(S, Declined(migration_id(), DeclineReason.UNKNOWN))
    assert instance.handle(stage, 0.0, S) == [CancelFetch(fetch.copy_id), declined]
    assert num_used(instance) == 2
    assert copied(instance, fetch) == []
    assert_holds_nothing(instance)


def test_nothing_comes_after_the_last_stage() -> None:
    """A paused request makes no further token, so a stage after the last one is declined."""
    instance = with_copy()
    stage = Stage((7, 7, 7, 7), 13, ticket(1, 43), True)  # the rest of the third block would be missing
    assert instance.handle(stage, 0.0, S) == [Send(S, Declined(migration_id(), DeclineReason.UNKNOWN))]
    assert_holds_nothing(instance)


@pytest.mark.parametrize(
    "absurd",
    [
        offer(MOVED, 10),  # KV for the newest token as well
        offer(MOVED, 11),
        offer(MOVED, 0),
        offer(MOVED, -4),
        offer(MOVED, 2**62),
        offer(MOVED, 8, 40),  # too few blocks
        offer(MOVED, 8, *range(1000)),  # too many
        replace(offer(MOVED, 8), ticket=ticket(0)),
        offer(replace(MOVED, prompt_token_ids=(), output_token_ids=()), 8),
        offer(replace(MOVED, prompt_token_ids=(1,), output_token_ids=()), 1, 40),
        offer(replace(MOVED, prompt_token_ids=(1,) * 10_000), 9_999, *range(2_500)),
    ],
)
def test_an_offer_that_makes_no_sense_is_declined(absurd: Offer) -> None:
    """An offer with inconsistent or huge numbers reserves nothing."""
    instance = destination()
    [effect] = instance.handle(absurd, 0.0, S)
    assert isinstance(effect, Send)
    assert isinstance(effect.message, Declined)
    assert_holds_nothing(instance)


def test_transfer_numbers_may_have_any_size() -> None:
    """A number is only a name: nothing here is sized or counted by it."""
    instance = destination()
    for number in (0, -1, 2**62):
        message = replace(WHOLE, ticket=ticket(0, 40, 41, 42, number=number))
        copied(instance, fetch_of(instance.handle(message, 0.0, S)))
        assert Send(S, Copied(migration_id(number), 0)) in instance.effects
        instance.handle(Withdrawn(migration_id(number)), 0.0, S)
        instance.handle(Withdrawn(migration_id(number)), 0.0, S)
    assert_holds_nothing(instance)


def test_each_source_counts_for_itself() -> None:
    """The same number from two workers names two migrations, and neither worker can end the other's."""
    instance = destination()
    instance.handle(PeerUp(STRANGER, Role.WORKER, INFO))
    fetch_of(instance.handle(WHOLE, 0.0, S))
    fetch_of(instance.handle(replace(WHOLE, request=replace(MOVED, request_id="q")), 0.0, STRANGER))
    instance.handle(Withdrawn(migration_id()), 0.0, STRANGER)
    assert list(instance.state.migration_destination._incoming) == [Transfer(S, migration_id())]
