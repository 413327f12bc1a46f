"""Scenarios in which a move fails: it is not tried again and again, and it is not held against anybody."""

from dataclasses import replace

from actorserve.core.effects import Send
from actorserve.core.messages import Copied, Declined, DeclineReason, Keep, LoadReport, Offer, Withdrawn
from tests.core.harness.driver import migration_id
from tests.core.harness.gateway import A, B
from tests.core.harness.source import D, E, at, chosen, decoding, order, source, told
from tests.core.migration.test_handover import HAND_OVER, with_tokens

REPORT = LoadReport(1, 0, 0, 800, 0, 0, 100, 4, 0)


def test_who_is_kept_stays_until_another_order() -> None:
    """Where the gateway keeps a request here, the copy is let go, and nobody more is sent to that destination."""
    instance = at("handing over")
    effects = instance.handle(Keep("r", 1))
    assert told(effects, D) == [Withdrawn(migration_id())]
    for _ in range(3):
        assert not any(isinstance(message, Offer) for message in told(instance.done(), D))
    order(instance)
    assert chosen(instance) == ["r"]


def test_a_late_no_ends_no_order_to_somebody_else() -> None:
    """What an earlier destination says concerns that one alone."""
    instance = source()
    decoding(instance)
    order(instance)
    order(instance, to=E)
    instance.handle(Declined(migration_id(), DeclineReason.UNKNOWN), 0.0, D)
    assert chosen(instance) == ["r"], "it goes to the other now"


def test_to_be_done_first_is_no_failure() -> None:
    """A request that ends while it is copied is not counted among the moves that failed."""
    instance = source()
    decoding(instance, max_tokens=3)
    order(instance)
    instance.done()
    instance.done()
    assert instance.state.migration_source.num_failed == 0
    assert instance.handle(Copied(migration_id(), 0), 0.0, D) == [Send(D, Withdrawn(migration_id()))]


def test_nothing_is_handed_to_who_drains() -> None:
    """A worker that is known to drain would refuse it: its owner keeps it, with its KV."""
    state = with_tokens()
    state.handle(replace(REPORT, draining=True), 0.0, B)
    assert state.handle(HAND_OVER, 0.0, A) == [Send(A, Keep("r", 1))]
