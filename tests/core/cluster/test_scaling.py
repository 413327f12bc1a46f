"""Auto-scaling over virtual time: when instances are started and told to end, and what counts as capacity."""

from dataclasses import replace
from itertools import pairwise

import pytest

from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.cluster.scaling import MAX_PAUSE_S, ScalingConfig
from actorserve.core.cluster.state import ClusterState
from actorserve.core.messages import Peer, Place, StartFailed
from tests.core.harness.fleets import GATEWAY
from tests.core.harness.scaled import CONFIG, Cluster, Load


def test_an_instance_is_started_when_room_stays_short() -> None:
    """Under the lower bound for the hold time, a worker is started; a shorter dip starts none."""
    cluster = Cluster(Load(900, 10))  # 10 tokens for each
    assert cluster.run(1.75) == []
    cluster.loads[Peer("worker-0", 1)] = Load(500, 10)
    assert cluster.run(0.5) == []
    cluster.loads[Peer("worker-0", 1)] = Load(900, 10)
    assert cluster.run(2.25) == [(4.5, "start")]


def test_a_starting_instance_counts_as_room_to_come() -> None:
    """A second worker is started only for a need that the first will not meet."""
    cluster = Cluster(Load(900, 10))
    assert cluster.run(20.0) == [(2.25, "start")]
    # (1000 - 1900 + 1000) / 20 with one more on its way.
    cluster = Cluster(Load(900, 60, {"num_waiting": 10, "kv_wanted_bytes": 1000}))
    assert cluster.run(20.0) == [(2.25, "start"), (4.5, "start"), (6.75, "start")]  # four workers are the most


def test_the_mean_is_over_requests_so_an_idle_instance_hides_nothing() -> None:
    """One idle and one full instance leave (1000 + 0) / 100 tokens for each running request, which is too little."""
    cluster = Cluster(Load(1000, 100), Load(0, 0))
    assert cluster.run(3.0) == [(2.25, "start")]
    cluster = Cluster(Load(1000, 40), Load(0, 0))
    assert cluster.run(20.0) == []


def test_requests_that_wait_count_with_their_demand() -> None:
    """Requests in the cluster's queue and on instances want KV as well, beyond the head of the line."""
    cluster = Cluster(Load(500, 10))
    cluster.run(3.0)
    for number in range(5):
        cluster.handle(Place(f"r{number}", 1, 600), cluster.now, GATEWAY)
    assert [what for _, what in cluster.run(2.5)] == ["start"]
    cluster = Cluster(Load(500, 10, {"num_waiting": 5, "kv_wanted_bytes": 450}))
    assert [what for _, what in cluster.run(2.5)] == ["start"]


def test_a_failed_start_is_tried_again() -> None:
    """A worker that was not up in time, or could not be started, is still needed."""
    cluster = Cluster(Load(900, 10))
    assert cluster.run(36.0) == [(2.25, "start"), (34.25, "start")]
    cluster.handle(StartFailed(), cluster.now)
    assert cluster.run(5.0) == [(36.25 + 2 * 2.0, "start")]


def failing(seconds: float, cluster: Cluster) -> list[float]:
    """The times at which starts were ordered; every start fails at once."""
    started: list[float] = []
    until = cluster.now + seconds
    while cluster.now < until:
        for when, what in cluster.run(0.25):
            assert what == "start"
            started.append(when)
            cluster.handle(StartFailed(), cluster.now)
    return started


def test_the_pause_doubles_while_starts_fail() -> None:
    """After each failed start the next one waits twice as long, up to a bound, until one has succeeded."""
    cluster = Cluster(Load(900, 10))
    started = failing(1500.0, cluster)
    pauses = [
        later - earlier - 0.25 for earlier, later in pairwise(started)
    ]  # the round after the failure begins the pause
    assert pauses[:10] == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, MAX_PAUSE_S, MAX_PAUSE_S]
    until = cluster.now + MAX_PAUSE_S
    while not cluster.run(0.25):
        assert cluster.now < until
    cluster.come("worker-1", Load(900, 10))
    again = failing(20.0, cluster)
    assert [later - earlier - 0.25 for earlier, later in pairwise(again)] == [2.0, 4.0, 8.0]


def test_initial_instances_that_load_are_not_started_twice() -> None:
    """While initial instances load their models, none is started in their place.

    They do not show how long a start takes, and are not waited for longer than any other.
    """
    config = replace(CONFIG, min_workers=2, scale_in_above=2000.0, num_initial=2)
    cluster = Cluster(config=config)
    assert cluster.run(20.0) == []
    cluster.come("worker-0", Load())
    assert cluster.run(5.0) == []
    cluster.come("worker-1", Load())
    assert cluster.run(40.0) == []
    assert cluster.state.scaling is not None
    assert (cluster.state.scaling.warm_up_s, cluster.state.scaling.num_starting) == (0.0, 0)
    late = Cluster(config=config)
    assert [when for when, _ in late.run(31.0)] == []
    assert [when for when, _ in late.run(5.0)] == [30.25 + 2.0, 30.25 + 2.0 + 2.25]


def test_a_start_is_measured_though_initial_ones_came_first() -> None:
    """The first report of an initial instance ends no start that was ordered later."""
    cluster = Cluster(Load(900, 10), config=replace(CONFIG, num_initial=2))
    assert cluster.run(5.0) == []
    cluster.come("worker-1", Load(900, 10))
    assert cluster.run(5.0) == [(7.25, "start")]
    cluster.come("worker-2", Load())
    cluster.run(0.25)
    assert cluster.state.scaling is not None
    assert cluster.state.scaling.warm_up_s == 10.0 - 7.25


def test_no_instance_ends_sooner_than_one_starts() -> None:
    """If a start takes longer than the hold time, each instance ends only after as long a quiet time."""
    cluster = Cluster(*[Load(0, 0)] * 4)
    assert cluster.state.scaling is not None
    cluster.state.scaling.warm_up_s = 60.0
    assert cluster.run(60.0) == []
    assert [what for _, what in cluster.run(0.25)] == ["worker-0"]
    cluster.go("worker-0")
    assert cluster.run(60.0) == []
    assert [what for _, what in cluster.run(0.5)][:1] == ["worker-1"]


def test_a_start_is_measured() -> None:
    """The warm-up time is that of the last worker, from the order to its first report."""
    cluster = Cluster(Load(900, 10))
    cluster.run(10.0)
    cluster.come("worker-1", Load())
    cluster.run(0.25)
    assert cluster.state.scaling is not None
    assert cluster.state.scaling.warm_up_s == 10.0 - 2.25
    assert cluster.state.scaling.num_starting == 0


def test_it_looks_ahead_as_far_as_a_start_takes() -> None:
    """While demand grows, a worker is started so early that it is up before room gets short."""

    def started_s(warm_up_s: float) -> float:
        cluster = Cluster(Load(0, 0), config=ScalingConfig(4, 1, 20.0, 1000.0, 2.0))
        assert cluster.state.scaling is not None
        cluster.state.scaling.warm_up_s = warm_up_s
        for second in range(100):
            cluster.loads[Peer("worker-0", 1)] = Load(10 * second, 10)
            found = cluster.run(1.0)
            if found:
                return found[0][0]
        raise AssertionError("no worker was started")

    # (1000 - 10 t) / 10 is under 20 from t = 80 on.
    assert 82.0 <= started_s(0.0) <= 84.0
    assert 60.0 <= started_s(20.0) <= 66.0


def test_the_instance_with_the_fewest_requests_ends_when_room_stays_ample() -> None:
    """Over the upper bound for the hold time, an instance is told to end, again and again until it reports so."""
    cluster = Cluster(Load(100, 4), Load(50, 2), Load(100, 3))
    assert cluster.run(2.0) == []
    assert cluster.run(0.25) == [(2.25, "worker-1")]
    assert not cluster.state.fleet.views[Peer("worker-1", 1)].is_healthy
    assert cluster.run(0.5) == [(2.5, "worker-1"), (2.75, "worker-1")]
    cluster.loads[Peer("worker-1", 1)].fields["draining"] = True
    assert cluster.run(10.0) == []  # no other one while it terminates
    cluster.go("worker-1")
    assert cluster.run(2.25)[-1][1] == "worker-2"


def test_the_last_ones_stay() -> None:
    """At least the minimum stays, and an instance does not end if room would then be short."""
    assert Cluster(Load(0, 0)).run(20.0) == []
    two = ScalingConfig(4, min_workers=2, scale_out_below=20.0, scale_in_above=100.0, hold_s=2.0)
    assert Cluster(Load(0, 0), Load(0, 0), config=two).run(20.0) == []
    # 1200 / 10 is over the upper bound. With one instance less, 200 / 10 would be at the lower bound.
    assert Cluster(Load(400, 5), Load(400, 5)).run(2.25) == [(2.25, "worker-0")]
    assert Cluster(Load(401, 5), Load(400, 5)).run(20.0) == []


def test_no_instance_ends_while_one_starts() -> None:
    """If room becomes ample while a worker is starting, no instance ends before it is up."""
    cluster = Cluster(Load(900, 10), Load(900, 10))
    assert cluster.run(2.25) == [(2.25, "start")]
    for peer in cluster.loads:
        cluster.loads[peer] = Load(0, 1)
    assert cluster.run(20.0) == []
    cluster.come("worker-2", Load())
    assert [what for _, what in cluster.run(3.0)][:1] == ["worker-2"]


def test_fewer_than_the_minimum_are_made_up_for() -> None:
    """With too few workers for a while, as after deaths, one after another is started; not while they come up."""
    config = ScalingConfig(4, min_workers=2, scale_out_below=20.0, scale_in_above=2000.0, hold_s=2.0)
    cluster = Cluster(config=config)
    assert cluster.run(1.5) == []
    cluster.come("worker-0", Load())
    cluster.come("worker-1", Load())
    assert cluster.run(10.0) == []
    cluster.go("worker-0")
    assert [what for _, what in cluster.run(10.0)] == ["start"]


def test_without_scaling_nothing_is_due() -> None:
    """A coordinator that neither scales nor has anything to choose has no deadline."""
    assert ClusterState(ClusterConfig(100, 1.0)).next_deadline() is None


@pytest.mark.parametrize(
    "values",
    [
        {"max_workers": 1, "min_workers": 2},
        {"max_workers": 4, "min_workers": 0},
        {"max_workers": 4, "scale_out_below": 5.0, "scale_in_above": 5.0},
    ],
)
def test_bounds_that_make_no_sense_are_refused(values: dict[str, float]) -> None:
    """The minimum is at most the maximum, and workers do not start and end at the same load."""
    with pytest.raises(ValueError, match="must be"):
        ScalingConfig(**values)  # type: ignore[arg-type]
