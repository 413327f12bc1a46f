"""A token bucket lets through what the rate says, and bursts."""

import pytest

from workers.kv_transfer.pacing import Rate, TokenBucket


class Clock:
    """Time passes by sleeping."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_rate_is_kept(clock: Clock) -> None:
    """Beyond a burst of 20 ms, so many bytes take as long as the rate says, however they are cut."""
    bucket = TokenBucket(Rate(1000.0, clock, clock.sleep))
    for num_bytes in (1, 500, 3, 1496, 20):
        bucket.take(num_bytes)
    assert clock.now_s - 100.0 == pytest.approx(2.0)


def test_a_pause_gives_a_burst_and_no_more(clock: Clock) -> None:
    """After any pause 20 ms' worth goes at once."""
    bucket = TokenBucket(Rate(1000.0, clock, clock.sleep))
    clock.now_s += 3600.0
    bucket.take(20)
    assert clock.now_s == 3700.0
    bucket.take(10)
    assert clock.now_s == pytest.approx(3700.01)


def test_urgent_bytes_go_at_once_and_are_paid_by_the_next(clock: Clock) -> None:
    """What is urgent never waits; who comes then waits for it, too."""
    bucket = TokenBucket(Rate(1000.0, clock, clock.sleep))
    bucket.take(1020, is_urgent=True)
    assert clock.now_s == 100.0
    bucket.take(500)
    assert clock.now_s == pytest.approx(101.5)


def test_without_a_rate_nobody_waits(clock: Clock) -> None:
    """None lets everything through."""
    bucket = TokenBucket(Rate(None, clock, clock.sleep))
    for _ in range(3):
        bucket.take(2**40)
    assert clock.now_s == 100.0
