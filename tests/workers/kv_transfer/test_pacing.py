"""A token bucket keeps the rate, and allows bursts."""

import pytest

from workers.kv_transfer.pacing import Rate, TokenBucket


class Clock:
    """A clock that only ``sleep`` moves."""

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
    """After a burst of 20 ms, bytes take as long as the rate says, in calls of any size."""
    bucket = TokenBucket(Rate(1000.0, clock, clock.sleep))
    for num_bytes in (1, 500, 3, 1496, 20):
        bucket.take(num_bytes)
    assert clock.now_s - 100.0 == pytest.approx(2.0)


def test_a_pause_gives_a_burst_and_no_more(clock: Clock) -> None:
    """After any pause 20 ms' worth of bytes goes at once."""
    bucket = TokenBucket(Rate(1000.0, clock, clock.sleep))
    clock.now_s += 3600.0
    bucket.take(20)
    assert clock.now_s == 3700.0
    bucket.take(10)
    assert clock.now_s == pytest.approx(3700.01)


def test_urgent_bytes_go_at_once_and_later_bytes_wait(clock: Clock) -> None:
    """Urgent bytes never wait, and later bytes wait for them, too."""
    bucket = TokenBucket(Rate(1000.0, clock, clock.sleep))
    bucket.take(1020, is_urgent=True)
    assert clock.now_s == 100.0
    bucket.take(500)
    assert clock.now_s == pytest.approx(101.5)


def test_without_a_rate_no_bytes_wait(clock: Clock) -> None:
    """A rate of None lets all bytes through at once."""
    bucket = TokenBucket(Rate(None, clock, clock.sleep))
    for _ in range(3):
        bucket.take(2**40)
    assert clock.now_s == 100.0
