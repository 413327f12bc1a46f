"""Counters and histograms that every gateway of a host counts for itself, and of which each gateway tells the sums."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Final

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from actorserve.http.host_counts import HostCounts, Name

_SUM: Final = "sum"
_INFINITE: Final = "+Inf"


def _shown(bounds: Sequence[float]) -> list[str]:
    return [_INFINITE if bound == inf else str(float(bound)) for bound in bounds]


class Counter:
    """A number that only grows."""

    def __init__(self, counts: HostCounts, name: Name) -> None:
        self._values = counts.values
        self._cell = counts.cell(name)

    def inc(self, by: float = 1.0) -> None:
        self._values[self._cell] += by


class Histogram:
    """How many observed values lie below each bound, and their sum. ``bounds`` rise; the last is infinite."""

    def __init__(self, counts: HostCounts, name: Name, bounds: Sequence[float]) -> None:
        self._values = counts.values
        self._bounds = bounds
        self._cells = [counts.cell((*name, bound)) for bound in _shown(bounds)]
        self._sum = counts.cell((*name, _SUM))

    def observe(self, value: float) -> None:
        self._values[self._cells[bisect_left(self._bounds, value)]] += 1.0
        self._values[self._sum] += value


class CounterFamily:
    """The counters of one name, by the values of their labels."""

    def __init__(self, counts: HostCounts, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self.name = name
        self._counts, self._text, self._labels = counts, text, tuple(labels)
        if not labels:
            self.labels()  # so that it is shown before it counts

    def labels(self, *values: str) -> Counter:
        return Counter(self._counts, (self.name, *values))

    def collect(self, totals: Mapping[Name, float]) -> Metric:
        family = CounterMetricFamily(self.name, self._text, labels=self._labels)
        for name, total in totals.items():
            family.add_metric(name[1:], total)
        return family


class HistogramFamily:
    """The histograms of one name, by the values of their labels. They are shown under the name ``also``, too."""

    def __init__(
        self, counts: HostCounts, name: str, text: str, labels: Sequence[str], bounds: Sequence[float], also: str = ""
    ) -> None:
        self.name = name
        self.also = also
        self._counts, self._text, self._labels = counts, text, tuple(labels)
        self._bounds = (*bounds, inf)

    def labels(self, *values: str) -> Histogram:
        return Histogram(self._counts, (self.name, *values), self._bounds)

    def collect(self, totals: Mapping[Name, float], shown_name: str = "") -> Metric:
        family = HistogramMetricFamily(shown_name or self.name, self._text, labels=self._labels)
        for labels in dict.fromkeys(name[1:-1] for name in totals):
            buckets: list[tuple[str, float]] = []
            num_below = 0.0
            for bound in _shown(self._bounds):
                num_below += totals.get((self.name, *labels, bound), 0.0)
                buckets.append((bound, num_below))
            family.add_metric(labels, buckets, totals.get((self.name, *labels, _SUM), 0.0))
        return family


class HostMetrics(Collector):
    """Collects the sums over the host of all families that were added."""

    def __init__(self, counts: HostCounts) -> None:
        self.counts = counts
        self._families: list[CounterFamily | HistogramFamily] = []

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> CounterFamily:
        family = CounterFamily(self.counts, name, text, labels)
        self._families.append(family)
        return family

    def histogram(
        self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float], also: str = ""
    ) -> HistogramFamily:
        family = HistogramFamily(self.counts, name, text, labels, bounds, also)
        self._families.append(family)
        return family

    def collect(self) -> Iterable[Metric]:
        by_family: dict[str, dict[Name, float]] = {family.name: {} for family in self._families}
        for name, total in self.counts.totals().items():
            if name[0] in by_family:
                by_family[name[0]][name] = total
        for family in self._families:
            yield family.collect(by_family[family.name])
            if isinstance(family, HistogramFamily) and family.also:
                yield family.collect(by_family[family.name], family.also)
