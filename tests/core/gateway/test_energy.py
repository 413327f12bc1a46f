"""A gateway sums what all owners of a request spent, and tells nothing if one of them did not know it."""

from dataclasses import replace

import pytest

from actorserve.core.effects import End
from actorserve.core.messages import (
    Attained,
    Energy,
    Finished,
    FinishReason,
    Keep,
    Peer,
    PeerDown,
    Placed,
    RefusalReason,
    Refused,
    Started,
)
from tests.core.harness.gateway import COORDINATOR, A, B, Gateway, running, tokens
from tests.core.harness.handover import HAND_OVER, with_tokens

PROMPT, TOKENS = Energy(8.0, 1.0), Energy(0.0, 4.5)


def ended(gateway: Gateway, epoch: int, owner: Peer, energy: Energy | None) -> Energy | None:
    """The energy that the client's side hears when this owner ends the request, which has two tokens."""
    finished = Finished("r", epoch, FinishReason.LENGTH, 2, energy)
    (end,) = [effect for effect in gateway.handle(finished, 1.0, owner) if isinstance(effect, End)]
    return end.energy


def test_a_requests_end_tells_its_energy() -> None:
    """One owner: what it told."""
    assert ended(with_tokens(), 1, A, PROMPT) == PROMPT


@pytest.mark.parametrize(
    ("first", "second", "total"),
    [(PROMPT, TOKENS, Energy(8.0, 5.5)), (None, TOKENS, None), (PROMPT, None, None)],
)
def test_a_hand_over_adds_what_the_source_spent(
    first: Energy | None, second: Energy | None, total: Energy | None
) -> None:
    """A handoff's prompt and tokens are computed by two owners. A source that repeats itself counts once."""
    gateway = with_tokens()
    gateway.handle(replace(HAND_OVER, energy=first), 0.0, A)
    gateway.handle(replace(HAND_OVER, energy=first), 0.0, A)
    gateway.handle(Started("r", 2), 0.0, B)
    assert ended(gateway, 2, B, second) == total


def test_a_request_that_is_kept_is_counted_by_its_owner_alone() -> None:
    """A source that was told to keep the request tells all of it at the end."""
    gateway = with_tokens()
    gateway.handle(PeerDown(B), 0.0)
    effects = gateway.handle(replace(HAND_OVER, energy=PROMPT), 0.0, A)
    assert any(isinstance(getattr(effect, "message", None), Keep) for effect in effects)
    assert ended(gateway, 1, A, PROMPT) == PROMPT


def test_what_an_owner_spent_before_it_gave_the_request_back_is_added() -> None:
    """A request that ran short of memory goes on elsewhere."""
    gateway = with_tokens()
    gateway.handle(Refused("r", 1, RefusalReason.OVERLOADED, 1.0, Attained(), PROMPT), 0.0, A)
    gateway.handle(Placed("r", 2, B), 0.0, COORDINATOR)
    gateway.handle(Started("r", 2), 0.0, B)
    assert ended(gateway, 2, B, TOKENS) == Energy(8.0, 5.5)


def test_a_worker_that_dies_takes_its_knowledge_with_it() -> None:
    """What the dead worker spent is not known, so neither is the sum."""
    gateway = running(A, B)
    for position in range(2):
        gateway.handle(tokens(1, position, 10), 0.0, A)
    gateway.handle(PeerDown(A), 0.0)
    gateway.handle(Placed("r", 2, B), 0.0, COORDINATOR)
    gateway.handle(Started("r", 2), 0.0, B)
    assert ended(gateway, 2, B, TOKENS) is None
