"""Scenarios of a migration's source that gives up, waits for an answer, or is told to go on."""

import pytest

from actorserve.core.effects import Effect, Send
from actorserve.core.messages import (
    Copied,
    Declined,
    DeclineReason,
    Finished,
    FinishReason,
    Keep,
    Message,
    Offer,
    Peer,
    PeerDown,
    Release,
    Resend,
    Start,
    Tick,
    Tokens,
    Withdrawn,
)
from tests.core.harness.driver import GATEWAY, migration_id
from tests.core.harness.source import (
    SOURCE,
    STAGES,
    TIMEOUT_S,
    D,
    E,
    assert_goes_on,
    assert_holds_nothing,
    at,
    chosen,
    decoding,
    hand_over,
    order,
    request_of,
    short_of_memory,
    source,
    told,
)


@pytest.mark.parametrize("stage", STAGES)
def test_its_client_leaves(stage: str) -> None:
    """Its blocks are free, and the destination is told to let go, unless the request may just have been handed over."""
    instance = at(stage)
    effects = instance.handle(Release("r", 1))
    assert told(effects, D) == ([] if stage == "handing over" else [Withdrawn(migration_id())])
    if instance.plan is not None:
        instance.done()
    assert_holds_nothing(instance)
    assert instance.handle(Copied(migration_id(), 1), 0.0, D) == [Send(D, Withdrawn(migration_id()))]
    assert instance.handle(Declined(migration_id(), DeclineReason.UNKNOWN), 0.0, D) == []
    assert instance.handle(Keep("r", 1)) == []


@pytest.mark.parametrize("stage", STAGES)
def test_its_gateway_dies(stage: str) -> None:
    """Nobody wants it any more: its blocks are free, here and there."""
    instance = at(stage)
    effects = instance.handle(PeerDown(GATEWAY))
    assert told(effects, D) == ([] if stage == "handing over" else [Withdrawn(migration_id())])
    if instance.plan is not None:
        instance.done()
    assert_holds_nothing(instance)


@pytest.mark.parametrize("stage", ["copying", "last due"])
def test_it_finishes_first(stage: str) -> None:
    """Its last token is made here: it ends here, and the destination lets go."""
    instance = source()
    decoding(instance, max_tokens=3)
    order(instance)
    if stage == "copying":
        instance.done()
    instance.done() if stage == "last due" else None
    if stage == "last due":
        instance.handle(Copied(migration_id(), 0), 0.0, D)
    effects = instance.done()
    assert told(effects, GATEWAY, D) == [Withdrawn(migration_id()), Finished("r", 1, FinishReason.LENGTH, 3)]
    assert_holds_nothing(instance)
    assert instance.handle(Copied(migration_id(), 0), 0.0, D) == [Send(D, Withdrawn(migration_id()))]


@pytest.mark.parametrize("num_host_blocks", [0, 8], ids=["dropped", "swapped"])
@pytest.mark.parametrize("stage", ["copying", "last due"])
def test_it_is_preempted(stage: str, num_host_blocks: int) -> None:
    """One whose blocks are taken for others is withdrawn, and comes back here as any that was preempted."""
    instance = short_of_memory(num_host_blocks=num_host_blocks)
    order(instance)
    order(instance, num_bytes=0)
    assert chosen(instance) == ["r"]
    if stage == "last due":
        instance.handle(Copied(migration_id(), 0), 0.0, D)
    # The step in flight ends, and the next one is planned with r's blocks: that is noticed with the next message.
    effects = [*instance.done(), *instance.handle(Tick())]
    if stage == "copying":
        assert told(effects, D)[0] == Withdrawn(migration_id())
        assert chosen(instance) == []
        assert instance.handle(Copied(migration_id(), 0), 0.0, D) == [Send(D, Withdrawn(migration_id()))]
    else:
        # It stood still before anybody could take them: the other one waits.
        assert chosen(instance) == ["r"]
        assert request_of(instance).blocks
        instance.handle(Declined(migration_id(), DeclineReason.NO_BLOCKS), 0.0, D)
    instance.handle(Release("other", 1))
    for _ in range(4):
        if instance.copies:
            instance.copied()
        if instance.plan is not None:
            instance.done()
    assert_goes_on(instance)


def test_nobody_takes_blocks_of_one_that_stands_still() -> None:
    """Another that wants room waits until it is gone, however long that takes, and goes on then."""
    instance = short_of_memory()
    other = request_of(instance, "other")
    order(instance)
    order(instance, num_bytes=0)
    instance.handle(Copied(migration_id(), 0), 0.0, D)
    instance.done()
    request = request_of(instance)
    assert request in instance.state.migration_source.paused
    blocks = list(request.blocks)
    for _ in range(3):
        if instance.plan is not None:
            instance.done()
        instance.handle(Tick())
    assert request.blocks == blocks
    had = other.num_output
    instance.handle(Copied(migration_id(), 1), 0.0, D)
    instance.handle(Release("r", 1))
    for _ in range(3):
        instance.done()
    assert other.num_output > had


@pytest.mark.parametrize("stage", ["copying", "last due", "standing still"])
def test_the_destination_declines(stage: str) -> None:
    """It goes on here; nobody is withdrawn, for nothing is held there."""
    instance = at(stage)
    effects = instance.handle(Declined(migration_id(), DeclineReason.NO_BLOCKS), 0.0, D)
    assert told(effects, D) == []
    assert chosen(instance) == []
    assert instance.state.migration_source.num_failed == 1
    assert_goes_on(instance)


@pytest.mark.parametrize("stage", ["copying", "last due", "standing still"])
def test_the_destination_dies(stage: str) -> None:
    """It goes on here."""
    instance = at(stage)
    instance.handle(PeerDown(D))
    assert chosen(instance) == []
    assert_goes_on(instance)


@pytest.mark.parametrize(
    "what", [Declined(migration_id(), DeclineReason.UNKNOWN), PeerDown(D), Copied(migration_id(), 1), Tick()]
)
def test_who_is_being_handed_over_waits_for_the_gateway_alone(what: Message) -> None:
    """It may be another's already: whatever else happens, it stands still until Release or Keep."""
    instance = at("handing over")
    instance.handle(what, 100.0, D)
    assert request_of(instance) in instance.state.migration_source.paused
    assert instance.plan is None
    instance.handle(Keep("r", 1))
    assert_goes_on(instance)


@pytest.mark.parametrize("stage", ["copying", "standing still"])
def test_a_destination_that_does_not_answer_in_time(stage: str) -> None:
    """It is told that the request stays, which goes on here."""
    instance = at(stage)
    deadline_s = instance.state.next_deadline()
    assert deadline_s is not None
    assert deadline_s >= TIMEOUT_S
    assert told(instance.handle(Tick(), deadline_s - 0.001), D) == []
    effects = instance.handle(Tick(), deadline_s)
    assert told(effects, D) == [Withdrawn(migration_id())]
    assert_goes_on(instance)


def test_an_order_ends_where_its_destination_declines() -> None:
    """Nobody is sent after one for whom there was no room."""
    instance = source(max_outgoing=1)
    decoding(instance, "first", num_prompt=5)
    decoding(instance, "second", num_prompt=20)
    order(instance)
    instance.handle(Declined(migration_id(), DeclineReason.NO_BLOCKS), 0.0, D)
    assert chosen(instance) == []


def test_one_whose_last_stage_is_due_has_no_deadline() -> None:
    """Only the step in flight is waited for, which ends by itself."""
    instance = at("last due")
    assert instance.state.next_deadline() is None
    assert told(instance.handle(Tick(), 1000.0), D) == []
    assert chosen(instance) == ["r"]


def test_the_gateway_is_asked_until_it_answers() -> None:
    """HandOver is repeated every retry_s, the same each time; after the answer it is not."""
    for answer in (Release("r", 1), Keep("r", 1)):
        instance = at("handing over")
        for turn in range(1, 4):
            assert instance.state.next_deadline() == turn * SOURCE.retry_s
            assert told(instance.handle(Tick(), turn * SOURCE.retry_s), GATEWAY) == [hand_over(2)]
        instance.handle(answer)
        assert instance.state.next_deadline() is None


def test_tokens_that_the_gateway_lacks_are_sent_again_while_it_stands_still() -> None:
    """Before it commits the gateway asks for them, and they are still here."""
    instance = at("handing over")
    [effect] = instance.handle(Resend("r", 1, 0))
    assert effect == Send(GATEWAY, Tokens(("r", "r"), (1, 1), (0, 1), (9, 9)))
    assert request_of(instance) in instance.state.migration_source.paused


def test_keep_of_another_epoch_or_at_another_stage_is_stale() -> None:
    """Only the answer to what was asked counts."""
    for stage, keep in [
        ("handing over", Keep("r", 2)),
        ("handing over", Keep("q", 1)),
        ("standing still", Keep("r", 1)),
    ]:
        instance = at(stage)
        before = instance.state.num_stale_messages
        assert instance.handle(keep) == []
        assert chosen(instance) == ["r"]
        assert instance.state.num_stale_messages == before + 1


@pytest.mark.parametrize(
    ("what", "sender", "answers"),
    [
        (Copied(migration_id(), 1), D, []),
        (Copied(migration_id(), -1), D, []),
        (Copied(migration_id(2), 0), D, [Send(D, Withdrawn(migration_id(2)))]),
        (Copied(migration_id(), 0), E, [Send(E, Withdrawn(migration_id()))]),
        (Declined(migration_id(2), DeclineReason.NO_BLOCKS), D, []),
        (Declined(migration_id(), DeclineReason.NO_BLOCKS), E, []),
    ],
)
def test_answers_to_what_was_not_asked_change_nothing(what: Message, sender: Peer, answers: list[Effect]) -> None:
    """Another stage than the one under way is stale; who copied what is not on its way to it lets go of that."""
    instance = at("copying")
    assert instance.handle(what, 0.0, sender) == answers
    assert instance.state.num_stale_messages == 1
    instance.handle(Copied(migration_id(), 0), 0.0, D)
    assert instance.handle(Copied(migration_id(), 0), 0.0, D) == []
    assert instance.state.num_stale_messages == 2
    assert told(instance.done(), D)


@pytest.mark.parametrize("stage", STAGES)
def test_a_newer_epoch_starts_here(stage: str) -> None:
    """The gateway gave it to this very instance again: the old epoch is gone with its migration, the new one runs."""
    instance = at(stage)
    request = request_of(instance)
    instance.handle(Start(2, request.spec_now()))
    assert chosen(instance) == []
    new = request_of(instance)
    assert (new.epoch, new.token_ids) == (2, request.token_ids)
    for late in (Keep("r", 1), Release("r", 1)):
        instance.handle(late)
    instance.handle(Copied(migration_id(), 1), 0.0, D)
    assert request_of(instance) is new
    while new.num_output == request.num_output:
        instance.done()
    assert_goes_on(instance)


def test_after_it_stayed_it_may_move_again() -> None:
    """Each attempt has a number of its own, so that nothing that is late is taken for the present."""
    instance = at("handing over")
    instance.handle(Keep("r", 1))
    [offer] = told(order(instance, E), E)
    assert isinstance(offer, Offer)
    assert offer.transfer == migration_id(2)
    assert instance.handle(Copied(migration_id(), 0), 0.0, D) == [Send(D, Withdrawn(migration_id()))]
    assert instance.handle(Declined(migration_id(), DeclineReason.UNKNOWN), 0.0, D) == []
    assert chosen(instance) == ["r"]
