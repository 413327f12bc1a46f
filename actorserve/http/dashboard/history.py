"""Throughput and latency over the last quarter of an hour, so that a page that is opened late shows what led there.

Throughput is that of all instances, from their load reports. Latencies are those of the host's gateways, from the
histograms of ``/metrics``: percentiles are estimated from buckets, as Prometheus' ``histogram_quantile`` does.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import Final, NamedTuple

from actorserve.core.gateway.shown import Shown
from actorserve.http.host_counts import Name
from actorserve.http.metrics.names import INTER_TOKEN_LATENCY, TIME_TO_FIRST_TOKEN

POINT_S: Final = 2.0
NUM_POINTS: Final = 450
_LATENCY_POINTS: Final = 15
"""Percentiles are those of the last 30 s."""
_RATE_POINTS: Final = 2
"""Rates are those of the last 4 s, because reports come once a second."""

Buckets = Counter[float]
"""How many values lie in a bucket, by its upper bound."""


class Point(NamedTuple):
    """One moment. Latencies in seconds; None: nothing was measured."""

    number: int
    tokens_per_s: float
    num_running: int
    num_waiting: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None


class History:
    """The last ``NUM_POINTS`` points. ``totals`` gives the host's counts (``http.host_counts``). The caller adds a
    point every ``POINT_S``.
    """

    def __init__(self, totals: Callable[[], Mapping[Name, float]]) -> None:
        self.points: deque[Point] = deque(maxlen=NUM_POINTS)
        self.rates: Mapping[str, float] = {}
        """The tokens/s of each instance, by its name."""
        self._totals = totals
        self._num_points = 0
        self._tokens: deque[tuple[float, dict[tuple[str, int], int]]] = deque(maxlen=_RATE_POINTS + 1)
        self._ttft: deque[Buckets] = deque(maxlen=_LATENCY_POINTS + 1)
        self._itl: deque[Buckets] = deque(maxlen=_LATENCY_POINTS + 1)

    def add(self, shown: Shown) -> None:
        """Add a point for this moment."""
        self._num_points += 1
        self._note_tokens(shown)
        totals = self._totals()
        self._ttft.append(buckets_of(totals, TIME_TO_FIRST_TOKEN))
        self._itl.append(buckets_of(totals, INTER_TOKEN_LATENCY))
        reports = [instance.report for instance in shown.instances if instance.report is not None]
        num_in_batch = sum(report.num_in_batch for report in reports)
        num_at_instances = sum(report.num_running + report.num_waiting for report in reports)
        num_unplaced = sum(request.state == "waiting" for request in shown.requests)
        self.points.append(
            Point(
                self._num_points,
                round(sum(self.rates.values()), 1),
                num_in_batch,
                num_at_instances - num_in_batch + num_unplaced,
                *(
                    quantile(lately, share)
                    for lately in (_lately(self._ttft), _lately(self._itl))
                    for share in (0.5, 0.99)
                ),
            )
        )

    def _note_tokens(self, shown: Shown) -> None:
        tokens = {
            (instance.name, instance.incarnation): instance.report.num_output_tokens
            for instance in shown.instances
            if instance.report is not None
        }
        if not self._tokens or shown.reports_at_s > self._tokens[-1][0]:
            self._tokens.append((shown.reports_at_s, tokens))
            (first_s, first), (last_s, last) = self._tokens[0], self._tokens[-1]
            self.rates = {
                name: round((count - first[name, incarnation]) / (last_s - first_s), 1)
                for (name, incarnation), count in last.items()
                if last_s > first_s and (name, incarnation) in first
            }
        else:
            self.rates = {}  # no report has come since the last point


def buckets_of(totals: Mapping[Name, float], family: str) -> Buckets:
    """The histogram ``family``, summed over its labels."""
    buckets: Buckets = Counter()
    for name, total in totals.items():
        if name[0] == family and name[-1] != "sum":
            buckets[inf if name[-1] == "+Inf" else float(name[-1])] += int(total)
    return buckets


def quantile(buckets: Buckets, share: float) -> float | None:
    """The value below which this share of the values lies. Values are spread evenly in a bucket; those in the infinite
    one count as its lower bound. None without values.
    """
    rank = share * buckets.total()
    if not rank:
        return None
    below = 0
    for lower, upper in pairwise((0.0, *sorted(buckets))):
        if below + buckets[upper] >= rank:
            return lower if upper == inf else lower + (upper - lower) * (rank - below) / buckets[upper]
        below += buckets[upper]
    raise AssertionError("some bucket reaches the total")


def columns(points: Iterable[Point]) -> Sequence[Sequence[float | None]]:
    """The points as columns, in the order of the fields of ``Point``."""
    return list(zip(*points, strict=True)) or [[] for _ in Point._fields]


def _lately(totals: Sequence[Buckets]) -> Buckets:
    """What came since the first of these totals. A gateway that starts anew may take counts back for a moment."""
    return totals[-1] - totals[0]
