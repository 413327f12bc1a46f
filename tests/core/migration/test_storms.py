"""Scenarios of failed moves: a move is not repeated at once, and harms no other request."""

from dataclasses import replace

from actorserve.core.effects import Send
from actorserve.core.messages import Copied, Declined, DeclineReason, Keep, LoadReport, Offer, Withdrawn
from tests.core.harness.driver import migration_id
from tests.core.harness.gateway import A, B
from tests.core.harness.handover import HAND_OVER, with_tokens
from tests.core.harness.source import D, E, at, chosen, decoding, order, source, told

REPORT = LoadReport(1, 0, 0, 800, 0, 0, 100, 4, 0)


def test_a_kept_request_stays_until_another_order() -> None:
    """If the gateway keeps a request at its source, the copy is withdrawn, and no other request goes there."""
    instance = at("handing over")
    effects = instance.handle(Keep("r", 1))
    assert told(effects, D) == [Withdrawn(migration_id())]
    for _ in range(3):
        assert not any(isinstance(message, Offer) for message in told(instance.done(), D))
    order(instance)
    assert chosen(instance) == ["r"]


def test_a_late_decline_ends_no_order_to_another_worker() -> None:
    """A decline of an earlier destination concerns only that destination."""
    instance = source()
    decoding(instance)
    order(instance)
    order(instance, to=E)
    instance.handle(Declined(migration_id(), DeclineReason.UNKNOWN), 0.0, D)
    assert chosen(instance) == ["r"], "the request goes to the other destination now"


def test_finishing_first_is_no_failure() -> None:
    """A request that finishes during its copy does not count as a failed move."""
    instance = source()
    decoding(instance, max_tokens=3)
    order(instance)
    instance.done()
    instance.done()
    assert instance.state.migration_source.num_failed == 0
    assert instance.handle(Copied(migration_id(), 0), 0.0, D) == [Send(D, Withdrawn(migration_id()))]


def test_nothing_is_handed_to_a_draining_worker() -> None:
    """A draining worker would refuse the request, so its owner keeps it with its KV."""
    gateway = with_tokens()
    gateway.handle(replace(REPORT, draining=True), 0.0, B)
    assert gateway.handle(HAND_OVER, 0.0, A) == [Send(A, Keep("r", 1))]
