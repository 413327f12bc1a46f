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
    """Its blocks are freed, and the destination gets Withdrawn unless the request may just have been handed over."""
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
    """Its blocks are freed at the source and at the destination."""
    instance = at(stage)
    effects = instance.handle(PeerDown(GATEWAY))
    assert told(effects, D) == ([] if stage == "handing over" else [Withdrawn(migration_id())])
    if instance.plan is not None:
        instance.done()
    assert_holds_nothing(instance)


@pytest.mark.parametrize("stage", ["copying", "last due"])
def test_it_finishes_first(stage: str) -> None:
    """A request that makes its last token at the source ends there, and is withdrawn from the destination."""
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
    """A preempted request is withdrawn from the destination, and comes back at the source like any other."""
    instance = short_of_memory(num_host_blocks=num_host_blocks)
    order(instance)
    order(instance, num_bytes=0)
    assert chosen(instance) == ["r"]
    if stage == "last due":
        instance.handle(Copied(migration_id(), 0), 0.0, D)
    # The step in flight ends, and the next step gets r's blocks. The source notices at the next message.
    effects = [*instance.done(), *instance.handle(Tick())]
    if stage == "copying":
        assert told(effects, D)[0] == Withdrawn(migration_id())
        assert chosen(instance) == []
        assert instance.handle(Copied(migration_id(), 0), 0.0, D) == [Send(D, Withdrawn(migration_id()))]
    else:
        # r was paused before its blocks could be taken, so the other request waits.
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


@pytest.mark.parametrize("num_host_blocks", [0, 8], ids=["dropped", "swapped"])
def test_a_stage_that_is_copied_after_the_preemption_does_not_count(num_host_blocks: int) -> None:
    """The destination may have read blocks that another request had already got, so the move is given up."""
    instance = short_of_memory(num_host_blocks=num_host_blocks)
    order(instance)
    order(instance, num_bytes=0)
    instance.done()
    assert not request_of(instance).is_resident
    effects = instance.handle(Copied(migration_id(), 0), 0.0, D)
    assert told(effects, D, GATEWAY) == [Withdrawn(migration_id())]
    assert chosen(instance) == []
    assert request_of(instance) not in instance.state.migration_source.paused


def test_a_paused_request_is_not_preempted() -> None:
    """A request that needs its blocks waits until it is gone, however long that takes, and then goes on."""
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


@pytest.mark.parametrize("stage", ["copying", "last due", "paused"])
def test_the_destination_declines(stage: str) -> None:
    """The request goes on at the source. Nothing is withdrawn, because the destination holds nothing."""
    instance = at(stage)
    effects = instance.handle(Declined(migration_id(), DeclineReason.NO_BLOCKS), 0.0, D)
    assert told(effects, D) == []
    assert chosen(instance) == []
    assert instance.state.migration_source.num_failed == 1
    assert_goes_on(instance)


@pytest.mark.parametrize("stage", ["copying", "last due", "paused"])
def test_the_destination_dies(stage: str) -> None:
    """The request goes on at the source."""
    instance = at(stage)
    instance.handle(PeerDown(D))
    assert chosen(instance) == []
    assert_goes_on(instance)


@pytest.mark.parametrize(
    "what", [Declined(migration_id(), DeclineReason.UNKNOWN), PeerDown(D), Copied(migration_id(), 1), Tick()]
)
def test_a_request_being_handed_over_waits_for_its_gateway_alone(what: Message) -> None:
    """It may have a new owner already, so it stays paused until Release or Keep, whatever else happens."""
    instance = at("handing over")
    instance.handle(what, 100.0, D)
    assert request_of(instance) in instance.state.migration_source.paused
    assert instance.plan is None
    instance.handle(Keep("r", 1))
    assert_goes_on(instance)


@pytest.mark.parametrize("stage", ["copying", "paused"])
def test_a_destination_that_does_not_answer_in_time(stage: str) -> None:
    """It gets Withdrawn, and the request goes on at the source."""
    instance = at(stage)
    deadline_s = instance.state.next_deadline()
    assert deadline_s is not None
    assert deadline_s >= TIMEOUT_S
    assert told(instance.handle(Tick(), deadline_s - 0.001), D) == []
    effects = instance.handle(Tick(), deadline_s)
    assert told(effects, D) == [Withdrawn(migration_id())]
    assert_goes_on(instance)


def test_an_order_ends_when_its_destination_declines() -> None:
    """After a request was declined for lack of room, no other request follows it."""
    instance = source(max_outgoing=1)
    decoding(instance, "first", num_prompt=5)
    decoding(instance, "second", num_prompt=20)
    order(instance)
    instance.handle(Declined(migration_id(), DeclineReason.NO_BLOCKS), 0.0, D)
    assert chosen(instance) == []


def test_a_due_last_stage_has_no_deadline() -> None:
    """It waits only for the step in flight, which ends by itself."""
    instance = at("last due")
    assert instance.state.next_deadline() is None
    assert told(instance.handle(Tick(), 1000.0), D) == []
    assert chosen(instance) == ["r"]


def test_the_gateway_is_asked_until_it_answers() -> None:
    """HandOver is repeated unchanged every retry_s until the answer, and not after it."""
    for answer in (Release("r", 1), Keep("r", 1)):
        instance = at("handing over")
        for turn in range(1, 4):
            assert instance.state.next_deadline() == turn * SOURCE.retry_s
            assert told(instance.handle(Tick(), turn * SOURCE.retry_s), GATEWAY) == [hand_over(2)]
        instance.handle(answer)
        assert instance.state.next_deadline() is None


def test_a_paused_request_resends_missing_tokens() -> None:
    """The gateway asks for missing tokens before it commits, and the source still has them."""
    instance = at("handing over")
    [effect] = instance.handle(Resend("r", 1, 0))
    assert effect == Send(GATEWAY, Tokens(("r",), (1,), (0,), (9, 9), run_lengths=(2,)))
    assert request_of(instance) in instance.state.migration_source.paused


def test_keep_of_another_epoch_or_at_another_stage_is_stale() -> None:
    """Only a Keep for the current epoch's hand-over counts."""
    for stage, keep in [
        ("handing over", Keep("r", 2)),
        ("handing over", Keep("q", 1)),
        ("paused", Keep("r", 1)),
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
def test_answers_without_a_question_change_nothing(what: Message, sender: Peer, answers: list[Effect]) -> None:
    """An answer about another stage is stale, and a worker that copied an unknown transfer gets Withdrawn."""
    instance = at("copying")
    assert instance.handle(what, 0.0, sender) == answers
    assert instance.state.num_stale_messages == 1
    instance.handle(Copied(migration_id(), 0), 0.0, D)
    assert instance.handle(Copied(migration_id(), 0), 0.0, D) == []
    assert instance.state.num_stale_messages == 2
    assert told(instance.done(), D)


@pytest.mark.parametrize("stage", STAGES)
def test_a_newer_epoch_starts_here(stage: str) -> None:
    """The gateway starts the request at its source again: the old epoch and its migration end, the new one runs."""
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


def test_a_request_that_stayed_may_move_again() -> None:
    """Each attempt has its own number, so late answers to an earlier attempt are recognised."""
    instance = at("handing over")
    instance.handle(Keep("r", 1))
    [offer] = told(order(instance, E), E)
    assert isinstance(offer, Offer)
    assert offer.transfer == migration_id(2)
    assert instance.handle(Copied(migration_id(), 0), 0.0, D) == [Send(D, Withdrawn(migration_id()))]
    assert instance.handle(Declined(migration_id(), DeclineReason.UNKNOWN), 0.0, D) == []
    assert chosen(instance) == ["r"]
