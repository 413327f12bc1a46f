"""What a gateway tells of a request's way: how long it was queued, on which workers it ran, and who shows them."""

from dataclasses import replace

import pytest

from actorserve.core.effects import Deliver
from actorserve.core.messages import LoadDigest, Open, PeerDown, Placed, Started, Tokens
from tests.core.harness.gateway import COORDINATOR, SPEC, A, B, opened, running, tokens


def test_queueing_is_timed_from_the_client_to_the_first_iteration() -> None:
    """The time in the cluster's queue and the time at the worker before the first iteration add up, once."""
    gateway = opened(A)
    gateway.handle(Placed("r", 1, A, 0.5), 0.75, COORDINATOR)
    first = Tokens(("r",), (1,), (0,), (7,), waited_s=(0.25,))
    assert gateway.handle(first, 1.5, A) == [Deliver("r", (7,), worker=A.name, kind="k", queued_s=1.0)]
    assert gateway.handle(tokens(1, 1, 8), 2.0, A) == [Deliver("r", (8,))]


@pytest.mark.parametrize("has_tokens", [False, True])
def test_a_request_is_queued_until_its_first_tokens_worker_begins(has_tokens: bool) -> None:
    """After a worker's death the next worker is named, and only a request without tokens was queued until there."""
    gateway = running(A, B)
    if has_tokens:
        gateway.handle(tokens(1, 0, 6), 1.0, A)
    gateway.handle(PeerDown(A), 2.0)
    gateway.handle(Placed("r", 2, B), 3.0, COORDINATOR)
    position = int(has_tokens)
    waited_s = () if has_tokens else (0.5,)
    delivered = gateway.handle(Tokens(("r",), (2,), (position,), (7,), waited_s=waited_s), 4.0, B)
    assert delivered == [Deliver("r", (7,), worker=B.name, kind="k", queued_s=0.0 if has_tokens else 3.5)]


def test_requests_without_an_owner_are_counted() -> None:
    """A request counts as without an owner until a worker has taken it, and again when that worker dies."""
    gateway = opened(A)
    gateway.handle(Open(replace(SPEC, request_id="s")), 0.0)
    assert gateway.state.num_unplaced == 2
    gateway.handle(Placed("r", 1, A), 0.0, COORDINATOR)
    assert gateway.state.num_unplaced == 2
    gateway.handle(Started("r", 1), 0.0, A)
    assert gateway.state.num_unplaced == 1
    gateway.handle(PeerDown(A), 0.0)
    assert gateway.state.num_unplaced == 2


def test_a_digest_says_which_host_shows_it() -> None:
    """The gateway knows the host whose gateways show the workers' loads."""
    gateway = opened(A)
    assert gateway.state.peers.shown_on == ""
    gateway.handle(LoadDigest((), (), "alpha"), 0.0, COORDINATOR)
    assert gateway.state.peers.shown_on == "alpha"
