"""Scenarios of the hand-over at the gateway: only the gateway commits, and the client's stream goes on complete."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from actorserve.core.effects import Deliver, Effect, End, Send
from actorserve.core.messages import (
    Close,
    Finished,
    FinishReason,
    HandOver,
    Keep,
    Message,
    Peer,
    PeerDown,
    Place,
    Placed,
    RefusalReason,
    Refused,
    Release,
    Resend,
    Start,
    Started,
    Tick,
    TokenLogprobs,
    Tokens,
    Transfer,
)
from tests.core.harness.driver import migration_id
from tests.core.harness.gateway import COORDINATOR, SPEC, A, B, Gateway, opened, tokens, up
from tests.core.harness.handover import ATTAINED, HAND_OVER, with_tokens

C = Peer("worker-2", 1)


def start(epoch: int, output: tuple[int, ...], transfer: Transfer | None, age_s: float = 0.0) -> Start:
    return Start(epoch, replace(SPEC, output_token_ids=output), replace(ATTAINED, age_s=age_s), transfer)


def committed_at(now: float) -> list[Effect]:
    """What a commit at ``now`` sends. The request came at 0 s."""
    return [Send(B, start(2, (10, 11), Transfer(A, migration_id(3)), now)), Send(A, Release("r", 1))]


COMMITTED = committed_at(0.0)


def committed() -> Gateway:
    """r was handed over to B, under epoch 2."""
    gateway = with_tokens()
    assert gateway.handle(HAND_OVER, 0.0, A) == COMMITTED
    return gateway


def unnamed(effects: Sequence[Effect]) -> list[Effect]:
    """The effects without the names of the workers that made the tokens."""
    return [replace(effect, worker="", kind="") if isinstance(effect, Deliver) else effect for effect in effects]


def test_the_gateway_commits() -> None:
    """A new epoch starts at the destination with the copied KV and the attained service; the source gets Release."""
    gateway = committed()
    assert gateway.state.counts.num_handed_over == 1
    assert gateway.handle(Started("r", 2), 0.0, B) == []
    assert unnamed(gateway.handle(tokens(2, 2, 12), 0.0, B)) == [Deliver("r", (12,))]
    assert gateway.handle(Finished("r", 2, FinishReason.STOP, 3), 0.0, B) == [
        Send(B, Release("r", 2)),
        End("r", FinishReason.STOP),
    ]
    assert not gateway.state.sessions


def test_a_request_without_kv_starts_without_a_transfer() -> None:
    """A request that waited at its owner, or dropped its KV, is computed at the destination."""
    gateway = with_tokens()
    effects = gateway.handle(replace(HAND_OVER, transfer=None), 0.0, A)
    assert effects == [Send(B, start(2, (10, 11), None)), Send(A, Release("r", 1))]


@pytest.mark.parametrize(("token_instance", "is_kept"), [(C, True), (B, False), (Peer("worker-9", 1), False)])
def test_a_prompt_that_moves_keeps_its_token_instance(token_instance: Peer, is_kept: bool) -> None:
    """Its new owner computes the prompt, and hands the request over as its first owner would have, unless that token
    instance is the new owner itself, or is gone.
    """
    gateway = opened(A, B, C)
    gateway.handle(Placed("r", 1, A, token_instance=token_instance), 0.0, COORDINATOR)
    asks = HandOver("r", 1, B, None, 0, ATTAINED)
    moved = replace(start(2, (), None), token_instance=token_instance if is_kept else None)
    assert gateway.handle(asks, 0.0, A) == [Send(B, moved), Send(A, Release("r", 1))]


def test_a_request_past_its_prompt_moves_without_a_token_instance() -> None:
    """The coordinator chose B for its tokens, because its first token instance had no room."""
    gateway = opened(A, B, C)
    gateway.handle(Placed("r", 1, A, token_instance=C), 0.0, COORDINATOR)
    gateway.handle(tokens(1, 0, 10), 0.0, A)
    effects = gateway.handle(HandOver("r", 1, B, None, 1, ATTAINED), 0.0, A)
    assert effects == [Send(B, start(2, (10,), None)), Send(A, Release("r", 1))]


def test_nothing_is_committed_while_tokens_are_missing() -> None:
    """The owner is asked for them once a retry_s, and the gateway commits as soon as the last one arrives."""
    gateway = with_tokens(0)
    assert gateway.handle(HAND_OVER, 0.0, A) == [Send(A, Resend("r", 1, 0))]
    assert gateway.handle(HAND_OVER, 0.5, A) == []
    assert gateway.handle(HAND_OVER, 1.0, A) == [Send(A, Resend("r", 1, 0))]
    assert unnamed(gateway.handle(tokens(1, 0, 10), 1.1, A)) == [Send(A, Resend("r", 1, 1)), Deliver("r", (10,))]
    effects = gateway.handle(tokens(1, 1, 11), 1.2, A)
    assert unnamed(effects) == [*committed_at(1.2), Deliver("r", (11,))]
    assert unnamed(gateway.handle(tokens(2, 2, 12), 1.3, B)) == [Deliver("r", (12,))]


def test_later_tokens_are_committed_as_well() -> None:
    """If the owner went on after it asked, because an earlier Keep was late, all tokens that the client has count."""
    gateway = with_tokens(3)
    [begin, _] = gateway.handle(HAND_OVER, 0.0, A)
    assert begin == Send(B, start(2, (10, 11, 12), Transfer(A, migration_id(3))))


@pytest.mark.parametrize("to", [C, Peer("worker-1", 2), Peer("worker-1", 0), COORDINATOR, Peer("", 0)])
def test_nothing_is_handed_to_an_unknown_worker(to: Peer) -> None:
    """The owner gets Keep each time that it asks, and its tokens are delivered."""
    gateway = with_tokens()
    for now in (0.0, 1.0):
        assert gateway.handle(replace(HAND_OVER, to=to), now, A) == [Send(A, Keep("r", 1))]
    assert gateway.state.counts.num_handed_over == 0
    assert unnamed(gateway.handle(tokens(1, 2, 12), 1.0, A)) == [Deliver("r", (12,))]


def test_kept_while_tokens_were_missing() -> None:
    """If the destination dies before they arrive, the owner keeps the request, and the question is forgotten."""
    gateway = with_tokens(1)
    assert gateway.handle(HAND_OVER, 0.0, A) == [Send(A, Resend("r", 1, 1))]
    assert gateway.handle(PeerDown(B), 0.1) == []
    assert unnamed(gateway.handle(tokens(1, 1, 11), 0.2, A)) == [Send(A, Keep("r", 1)), Deliver("r", (11,))]
    gateway.handle(up(B), 0.3)
    assert unnamed(gateway.handle(tokens(1, 2, 12), 0.4, A)) == [Deliver("r", (12,))]
    assert gateway.state.counts.num_handed_over == 0


@pytest.mark.parametrize("now", [0.0, 5.0])
def test_asked_again_after_it_committed(now: float) -> None:
    """If the Release was lost, it is sent again, and the request does not move twice."""
    gateway = committed()
    assert gateway.handle(HAND_OVER, now, A) == [Send(A, Release("r", 1))]
    assert gateway.state.counts.num_handed_over == 1
    assert gateway.state.sessions["r"].epoch == 2
    assert gateway.state.sessions["r"].instance == B


@pytest.mark.parametrize(
    "said",
    [
        tokens(1, 2, 99),
        Finished("r", 1, FinishReason.STOP, 2),
        Refused("r", 1, RefusalReason.DRAINING, 1.0),
        Started("r", 1),
        replace(HAND_OVER, to=C),
    ],
)
def test_what_the_old_owner_still_says_is_dropped(said: Message) -> None:
    """It gets Release, whatever it says of the old epoch."""
    gateway = committed()
    assert gateway.handle(said, 0.0, A) == [Send(A, Release("r", 1))]
    assert unnamed(gateway.handle(tokens(2, 2, 12), 0.0, B)) == [Deliver("r", (12,))]


def test_only_the_owner_hands_over() -> None:
    """Any other worker that asks, even the destination, gets Release."""
    gateway = with_tokens()
    for stranger in (B, C):
        assert gateway.handle(HAND_OVER, 0.0, stranger) == [Send(stranger, Release("r", 1))]
    assert gateway.handle(replace(HAND_OVER, epoch=2), 0.0, A) == [Send(A, Release("r", 2))]
    assert gateway.handle(replace(HAND_OVER, request_id="q"), 0.0, A) == [Send(A, Release("q", 1))]
    assert gateway.state.sessions["r"].instance == A


def test_the_start_is_repeated_until_it_is_answered() -> None:
    """Each repetition is the same, including the transfer."""
    gateway = committed()
    assert gateway.handle(Tick(), 1.0) == COMMITTED[:1]
    gateway.handle(Started("r", 2), 1.5, B)
    assert gateway.handle(Tick(), 3.0) == []


@pytest.mark.parametrize("has_answered", [False, True])
def test_the_destination_dies_right_after(has_answered: bool) -> None:
    """The request fails over to another worker from the tokens that its client has, without a transfer."""
    gateway = committed()
    if has_answered:
        gateway.handle(Started("r", 2), 0.0, B)
    [place] = gateway.handle(PeerDown(B), 0.1)
    assert place == Send(COORDINATOR, Place("r", 3, 5, avoid=B, kind="k", waited_s=0.1))
    [begin] = gateway.handle(Placed("r", 3, A), 0.2, COORDINATOR)
    assert isinstance(begin, Send)
    assert isinstance(begin.message, Start)
    assert (begin.to, begin.message.epoch, begin.message.transfer) == (A, 3, None)
    assert begin.message.request.output_token_ids == (10, 11)
    assert gateway.handle(tokens(2, 2, 99), 0.3, B) == [Send(B, Release("r", 2))]
    assert unnamed(gateway.handle(tokens(3, 2, 12), 0.3, A)) == [Deliver("r", (12,))]


def test_the_source_dies_before_it_asks() -> None:
    """The copy is of no use, so the request fails over like any other, and a late HandOver finds no owner."""
    gateway = with_tokens()
    [place] = gateway.handle(PeerDown(A), 0.1)
    assert isinstance(place, Send)
    assert place.to == COORDINATOR
    assert gateway.handle(HAND_OVER, 0.2, A) == [Send(A, Release("r", 1))]
    assert gateway.state.sessions["r"].instance is None


def test_the_source_dies_right_after() -> None:
    """It is not the owner any more, so nothing happens."""
    gateway = committed()
    assert gateway.handle(PeerDown(A), 0.1) == []
    assert unnamed(gateway.handle(tokens(2, 2, 12), 0.2, B)) == [Deliver("r", (12,))]


@pytest.mark.parametrize("reason", [RefusalReason.DRAINING, RefusalReason.OVERLOADED, RefusalReason.TOO_LARGE])
def test_the_destination_refuses_it(reason: RefusalReason) -> None:
    """The request is placed again under a new epoch, with the tokens that its client has."""
    gateway = committed()
    effects = gateway.handle(Refused("r", 2, reason, 1.0, ATTAINED), 0.1, B)
    assert effects[0] == Send(B, Release("r", 2))
    [place] = effects[1:]
    assert isinstance(place, Send)
    assert isinstance(place.message, Place)
    assert (place.message.epoch, place.message.avoid) == (3, B)


def test_the_client_leaves_right_after() -> None:
    """The destination gets Release, and so does the source when it asks again."""
    gateway = committed()
    assert Send(B, Release("r", 2)) in gateway.handle(Close("r"), 0.1)
    assert gateway.handle(HAND_OVER, 1.0, A) == [Send(A, Release("r", 1))]
    assert gateway.handle(Started("r", 2), 1.0, B) == [Send(B, Release("r", 2))]


def test_the_client_leaves_while_tokens_are_missing() -> None:
    """Nothing is left to hand over, so the owner gets Release now and when it asks again."""
    gateway = with_tokens(1)
    gateway.handle(HAND_OVER, 0.0, A)
    assert gateway.handle(Close("r"), 0.1) == [Send(A, Release("r", 1))]
    assert gateway.handle(HAND_OVER, 1.0, A) == [Send(A, Release("r", 1))]


def test_there_and_back_again() -> None:
    """A request may return to its first worker: each epoch has one owner, and only the newest epoch is heard."""
    gateway = committed()
    back = HandOver("r", 2, A, migration_id(), 2, ATTAINED)
    assert gateway.handle(back, 0.0, B) == [
        Send(A, start(3, (10, 11), Transfer(B, migration_id()))),
        Send(B, Release("r", 2)),
    ]
    assert gateway.handle(HAND_OVER, 0.2, A) == [Send(A, Release("r", 1))]
    assert gateway.handle(back, 0.2, B) == [Send(B, Release("r", 2))]
    assert gateway.state.sessions["r"].instance == A
    assert unnamed(gateway.handle(tokens(3, 2, 12), 0.3, A)) == [Deliver("r", (12,))]


def test_logprobs_are_whole_after_a_move() -> None:
    """Log-probabilities of earlier tokens come from the old owner before the commit, later ones from the new owner."""
    logprobs = [TokenLogprobs(-0.1 * n, (n,), (-0.1 * n,)) for n in range(4)]
    gateway = with_tokens(0)
    first = Tokens(("r",), (1,), (0,), (10,), (logprobs[0],))
    assert unnamed(gateway.handle(first, 0.0, A)) == [Deliver("r", (10,), (logprobs[0],))]
    assert gateway.handle(HAND_OVER, 0.0, A) == [Send(A, Resend("r", 1, 1))]
    second = Tokens(("r",), (1,), (0,), (10, 11), (logprobs[0], logprobs[1]), run_lengths=(2,))
    assert unnamed(gateway.handle(second, 0.1, A)) == [*committed_at(0.1), Deliver("r", (11,), (logprobs[1],))]
    rest = Tokens(("r", "r"), (2, 2), (2, 3), (12, 13), (logprobs[2], logprobs[3]))
    assert unnamed(gateway.handle(rest, 0.2, B)) == [Deliver("r", (12, 13), (logprobs[2], logprobs[3]))]


def test_absurd_numbers_commit_nothing() -> None:
    """A request with impossibly many tokens is never handed over; a negative count acts like none."""
    gateway = with_tokens()
    assert gateway.handle(replace(HAND_OVER, num_output_tokens=2**62), 0.0, A) == [Send(A, Resend("r", 1, 2))]
    assert gateway.state.counts.num_handed_over == 0
    [begin, _] = gateway.handle(replace(HAND_OVER, num_output_tokens=-5, transfer=migration_id(-7)), 0.0, A)
    assert begin == Send(B, start(2, (10, 11), Transfer(A, migration_id(-7))))


def test_the_client_hears_of_both_kinds_when_another_kind_goes_on() -> None:
    """A prompt was computed on one kind of worker, and the tokens after it on another."""
    gateway = with_tokens(2, A)
    gateway.handle(up(B, "other"), 0.0)
    gateway.handle(HAND_OVER, 0.0, A)
    (effect,) = gateway.handle(tokens(2, 2, 12), 0.0, B)
    assert isinstance(effect, Deliver)
    assert (effect.worker, effect.kind) == (B.name, "other")
