"""The speeds of instances: the fastest of those that are up counts."""

import pytest

from actorserve.core.messages import Peer, Speed
from actorserve.core.timing.speeds import InstanceSpeeds

A, B = Peer("worker-0", 1), Peer("worker-1", 1)


def speed(min_iteration_s: float) -> Speed:
    """A prefill takes 1 ms per token."""
    return Speed((1, 1000), (0.001, 1.0), min_iteration_s)


def test_the_fastest_instance_counts() -> None:
    """Prefill times are in quanta of the instance with the shortest iteration, until it goes down."""
    speeds = InstanceSpeeds()
    assert speeds.num_quanta(100) == 0.0
    speeds.learn(A, speed(0.02))
    speeds.learn(B, speed(0.01))
    assert speeds.num_quanta(100) == pytest.approx(10.0)
    speeds.forget(B)
    assert speeds.num_quanta(100) == pytest.approx(5.0)
    speeds.forget(A)
    assert speeds.num_quanta(100) == 0.0


@pytest.mark.parametrize("second_s", [0.01, 0.04])
def test_a_speed_that_comes_again_replaces_the_first(second_s: float) -> None:
    """An instance that is announced twice has one speed, the later one, and none after its death."""
    speeds = InstanceSpeeds()
    speeds.learn(A, speed(0.01))
    speeds.learn(A, speed(second_s))
    assert speeds.num_quanta(100) == pytest.approx(0.1 / second_s)
    speeds.forget(A)
    assert speeds.num_quanta(100) == 0.0


def test_an_invalid_speed_changes_nothing() -> None:
    """A speed whose curve has no points is refused, and the earlier speed still counts."""
    speeds = InstanceSpeeds()
    speeds.learn(A, speed(0.01))
    with pytest.raises(ValueError, match="a curve needs points"):
        speeds.learn(A, Speed((), (), 0.02))
    assert speeds.num_quanta(100) == pytest.approx(10.0)
