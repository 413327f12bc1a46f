"""The latencies that two simulators are compared by, and the runs that they come from."""

from collections.abc import Sequence
from dataclasses import dataclass

from actorserve.sim.results import Outcomes
from actorserve.sim.statistics import percentile

PERCENTILES = (50, 90, 99)
NAMES = ("TTFT", "TBT", "E2E")


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """One simulation. Latencies are in seconds, one for each request; the mean time between tokens is SplitwiseSim's:
    the time after the first token over all output tokens, the first included.
    """

    ttft_s: Sequence[float]
    tbt_s: Sequence[float]
    e2e_s: Sequence[float]
    cpu_s: float

    @property
    def requests_per_cpu_s(self) -> float:
        return len(self.e2e_s) / self.cpu_s

    def percentiles(self) -> list[float]:
        """Each of ``PERCENTILES`` of each of ``NAMES``."""
        columns = (self.ttft_s, self.tbt_s, self.e2e_s)
        return [percentile(sorted(column), percent) for column in columns for percent in PERCENTILES]


def run_of(outcomes: Outcomes, cpu_s: float) -> SimulatedRun:
    """Our run, in which all requests completed."""
    arrived, first, ended = outcomes.arrived_s, outcomes.first_token_s, outcomes.ended_s
    numbers = range(len(outcomes))
    return SimulatedRun(
        [first[number] - arrived[number] for number in numbers],
        [(ended[number] - first[number]) / outcomes.num_output[number] for number in numbers],
        [ended[number] - arrived[number] for number in numbers],
        cpu_s,
    )
