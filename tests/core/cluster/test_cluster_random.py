"""The coordinator under random events: what late binding promises holds after each of them."""

from hypothesis import example, given, settings, strategies as st

from actorserve.core.migration.pairing import PairingConfig
from tests.core.harness.coordinator import A, Coordinator
from tests.core.harness.late_binding import EVENTS, WORKERS, CheckedCluster


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, max_size=60), st.booleans())
@example(
    # At 1 s "r19" is overdue. The Place of "r20" reserves worker-1 for it, so "r20" has to wait.
    [
        ("report", WORKERS[1], 603, 0, 1000, False),
        ("place", 19, 798, 0, "", None, ()),
        ("place", 29, 289, 0, "", WORKERS[1], ()),
        ("wait", 1.0),
        ("place", 20, 116, 1, "", None, ()),
    ],
    False,
)
def test_late_binding_holds_under_random_events(events: list[tuple[object, ...]], migrates: bool) -> None:
    """No request is lost or waits although an instance admits it, and each goes where the plain definition says."""
    checked = CheckedCluster(PairingConfig(100.0, 200.0, 300.0) if migrates else None)
    for name, *values in events:
        checked.event(str(name), *values)


def test_a_new_request_does_not_take_what_is_reserved_in_the_same_call() -> None:
    """A request that comes when another request becomes overdue finds the freest instance reserved, and waits."""
    coordinator = Coordinator(A, promote_after_s=1.0)
    coordinator.report(A, 600)
    coordinator.place("long", 800)
    coordinator.place("elsewhere", 300, avoid=A)
    assert coordinator.reserved == {}
    assert coordinator.place("new", 100, now=1.0) == []
    assert coordinator.reserved == {"worker-0": "long"}
    assert list(coordinator.state.waiting) == ["long", "elsewhere", "new"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 2)), min_size=1, max_size=20))
def test_the_queue_is_by_class_and_level_and_stable(requests: list[tuple[int, int]]) -> None:
    """Waiting requests that are not promoted stand by class, then by level, then in order of arrival."""
    coordinator = Coordinator(A, promote_after_s=100.0)
    coordinator.report(A, 0)
    for number, (num_tokens, priority) in enumerate(requests):
        coordinator.place(f"r{number}", num_tokens, float(number), priority=priority)

    def level(num_tokens: int) -> int:
        needed_s, level = max(1.0, num_tokens / 100), 0
        while 1.05 * 2**level < needed_s:
            level += 1
        return level

    by_definition = sorted(
        range(len(requests)), key=lambda number: (requests[number][1], level(requests[number][0]), number)
    )
    assert list(coordinator.state.queue.order(50.0)) == [f"r{number}" for number in by_definition]
