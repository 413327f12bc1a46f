"""Restarting: the policy's arithmetic."""

from hypothesis import given, strategies as st

from actorserve.processes.restarts import GiveUp, Restart, RestartLimits, RestartPolicy

_LIMITS = RestartLimits(max_restarts=4, window_s=60.0, backoff_s=0.5, max_backoff_s=3.0)


def test_backoff_doubles_up_to_its_bound_and_then_gives_up() -> None:
    """Restarts after failures in a row wait 0.5, 1, 2 and 3 seconds; after the fifth failure there is no restart."""
    policy = RestartPolicy(_LIMITS)
    verdicts = [policy.failed(float(now)) for now in range(5)]
    assert verdicts == [Restart(0.5), Restart(1.0), Restart(2.0), Restart(3.0), GiveUp(5)]


def test_old_failures_are_forgiven() -> None:
    """A failure no longer counts after ``window_s``."""
    policy = RestartPolicy(_LIMITS)
    assert [policy.failed(now) for now in (0.0, 60.0, 120.0)] == [Restart(0.5)] * 3


@given(st.lists(st.floats(0, 100), max_size=60), st.integers(0, 5))
def test_it_gives_up_exactly_when_the_window_holds_too_many(gaps: list[float], max_restarts: int) -> None:
    """The verdict is GiveUp if and only if more failures than the maximum lie within the window."""
    limits = RestartLimits(max_restarts, 60.0, 0.5, 3.0)
    policy = RestartPolicy(limits)
    times: list[float] = []
    for gap in gaps:
        times.append((times[-1] if times else 0.0) + gap)
        recent = sum(at > times[-1] - 60.0 for at in times)
        verdict = policy.failed(times[-1])
        assert isinstance(verdict, GiveUp) == (recent > max_restarts)
        assert isinstance(verdict, GiveUp) or 0.5 <= verdict.after_s <= 3.0
