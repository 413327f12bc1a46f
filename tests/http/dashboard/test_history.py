"""Percentiles from buckets, and what the history keeps."""

from collections import Counter
from math import inf

import pytest

from actorserve.core.gateway.shown import Shown
from actorserve.http.dashboard.history import NUM_POINTS, History, buckets_of, quantile
from actorserve.http.host_counts import HostCounts
from actorserve.http.metrics.host_metrics import HostMetrics
from actorserve.http.metrics.names import TIME_TO_FIRST_TOKEN

NOTHING = Shown(0.0, (), 0.0, (), 0)


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    [
        ({}, 0.5, None),
        ({1.0: 0, 2.0: 0}, 0.5, None),
        ({1.0: 10}, 0.5, 0.5),
        ({1.0: 0, 2.0: 10}, 0.5, 1.5),
        ({1.0: 5, 2.0: 5}, 0.99, 1.98),
        ({1.0: 5, 2.0: 0, 4.0: 5}, 0.6, 2.4),
        ({1.0: 1, inf: 9}, 0.99, 1.0),
    ],
)
def test_quantiles(buckets: dict[float, int], share: float, expected: float | None) -> None:
    """A quantile lies in its bucket as if the values were spread evenly there."""
    found = quantile(Counter(buckets), share)
    assert found == expected or found == pytest.approx(expected)


def test_histograms_are_summed_over_their_labels() -> None:
    """The buckets of two models are one histogram, and other families do not count."""
    counts = HostCounts()
    host = HostMetrics(counts)
    family = host.histogram(TIME_TO_FIRST_TOKEN, "", ("model_name",), (1.0, 2.0))
    host.histogram("other", "", (), (1.0,)).labels().observe(0.5)
    family.labels("a").observe(0.5)
    family.labels("b").observe(0.5)
    family.labels("b").observe(9.0)
    assert buckets_of(counts.totals(), TIME_TO_FIRST_TOKEN) == {1.0: 2, 2.0: 0, inf: 1}


def test_latencies_are_those_of_the_last_half_minute() -> None:
    """What was measured before the window has no effect, and without anything new there is no latency."""
    counts = HostCounts()
    ttft = HostMetrics(counts).histogram(TIME_TO_FIRST_TOKEN, "", ("model_name",), (1.0, 2.0)).labels("a")
    history = History(counts.totals)
    ttft.observe(1.5)
    history.add(NOTHING)
    assert history.points[-1].ttft_p50_s is None, "it came before the first point"
    ttft.observe(0.5)
    for _ in range(15):
        history.add(NOTHING)
        assert history.points[-1].ttft_p50_s == 0.5
    history.add(NOTHING)
    assert history.points[-1].ttft_p50_s is None


def test_the_history_is_bounded() -> None:
    """The oldest points go, and numbers go on."""
    history = History(dict)
    for _ in range(NUM_POINTS + 3):
        history.add(NOTHING)
    assert [history.points[0].number, history.points[-1].number, len(history.points)] == [4, NUM_POINTS + 3, NUM_POINTS]
