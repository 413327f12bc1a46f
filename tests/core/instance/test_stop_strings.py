"""Answers that a stop string has ended at the gateway teach their lengths, and no other release does."""

import pytest

from actorserve.core.messages import Message, PeerDown, Release, Start
from actorserve.core.prediction.learned import LearnedLengths
from actorserve.core.request import Request
from actorserve.core.scheduling.policies import make_policy
from actorserve.core.timing.step_times import StepTimes
from tests.core.harness.driver import CONFIG, GATEWAY, PROFILE, Instance, spec

NUM_OUTPUT = 3
OTHER = Request(spec("other", 2), 1, GATEWAY)


def learning() -> tuple[Instance, LearnedLengths]:
    """An instance whose request "r", under epoch 2, has made three tokens of at most 20, and what it has learned."""
    times, learned = StepTimes(PROFILE), LearnedLengths()
    instance = Instance(CONFIG, make_policy("shortest_expected", times, predictor=learned), times)
    instance.start(spec("r", 2, max_tokens=20), epoch=2)
    for _ in range(NUM_OUTPUT):
        instance.done()
    return instance, learned


def test_a_complete_answer_teaches_its_length() -> None:
    """The length of an answer that a stop string ended is learned when the gateway says so."""
    instance, learned = learning()
    instance.handle(Release("r", 2, is_complete=True))
    assert learned.forecast(OTHER).rest(0) == NUM_OUTPUT
    assert not instance.state.requests


def test_an_answer_that_ended_here_is_not_learned_again() -> None:
    """A request that reached its own end just before the stop string was found has been learned already."""
    instance, learned = learning()
    while instance.state.requests:
        instance.done()
    instance.handle(Release("r", 2, is_complete=True))
    assert learned.forecast(OTHER).rest(0) == 20


@pytest.mark.parametrize(
    "message",
    [
        Release("r", 2),
        Release("r", 3),
        Release("r", 3, is_complete=True),
        Start(3, spec("r", 2, max_tokens=20)),
        PeerDown(GATEWAY),
    ],
    ids=["cancelled", "fenced", "ended elsewhere", "a newer epoch", "its gateway died"],
)
def test_no_other_release_teaches(message: Message) -> None:
    """The length so far of a request that was cancelled, fenced or moved says nothing about how long outputs are."""
    instance, learned = learning()
    instance.handle(message)
    assert learned.forecast(OTHER).rest(0) is None
