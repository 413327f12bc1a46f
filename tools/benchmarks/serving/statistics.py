"""From the outcomes of requests to the figures of a report."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from actorserve.sim.statistics import percentile

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Outcome:
    """One request as its client saw it; times in seconds on one monotonic clock.

    ``chunk_times_s`` are the arrival times of events with output. ``output_tokens`` is the server's count if it sent
    one, and otherwise the number of chunks. ``error`` is a short kind, or None for a request that ended well.
    """

    sent_s: float
    chunk_times_s: list[float] = field(default_factory=list)
    ended_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return self.chunk_times_s[0] - self.sent_s if self.chunk_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first."""
        if self.output_tokens < 2 or not self.chunk_times_s:
            return None
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Times between one event with output and the next."""
        return [later - earlier for earlier, later in zip(self.chunk_times_s, self.chunk_times_s[1:], strict=False)]

    @property
    def e2e_s(self) -> float | None:
        """Time from sending to the end of the answer."""
        return None if self.ended_s is None else self.ended_s - self.sent_s


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean and percentiles of ``count`` values."""

    count: int
    mean: float
    percentiles: dict[int, float]


@dataclass(frozen=True, slots=True)
class Report:
    """A measurement's figures. Latencies are those of requests that ended well.

    ``duration_s`` is the time from the first request's sending to the last one's end.
    """

    num_requests: int
    num_completed: int
    num_unfinished: int
    errors: dict[str, int]
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    latencies_s: dict[str, Summary | None]


def summarize(values: Sequence[float]) -> Summary | None:
    """None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return Summary(len(ordered), fmean(ordered), {p: percentile(ordered, p) for p in PERCENTILES})


def make_report(outcomes: Sequence[Outcome], now_s: float) -> Report:
    """Sum up outcomes; ``now_s`` ends the measurement if requests are still running."""
    completed = [outcome for outcome in outcomes if outcome.error is None and outcome.ended_s is not None]
    unfinished = [outcome for outcome in outcomes if outcome.error is None and outcome.ended_s is None]
    begin_s = min((outcome.sent_s for outcome in outcomes), default=now_s)
    end_s = now_s if unfinished or not outcomes else max(outcome.ended_s or outcome.sent_s for outcome in outcomes)
    duration_s = max(end_s - begin_s, 1e-9)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in completed)
    output_tokens = sum(outcome.output_tokens for outcome in completed)
    return Report(
        num_requests=len(outcomes),
        num_completed=len(completed),
        num_unfinished=len(unfinished),
        errors=dict(Counter(outcome.error for outcome in outcomes if outcome.error is not None).most_common()),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_s=len(completed) / duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) / duration_s,
        latencies_s={
            "ttft": summarize([value for outcome in completed if (value := outcome.ttft_s) is not None]),
            "tpot": summarize([value for outcome in completed if (value := outcome.tpot_s) is not None]),
            "itl": summarize([gap for outcome in completed for gap in outcome.itl_s]),
            "e2e": summarize([value for outcome in completed if (value := outcome.e2e_s) is not None]),
        },
    )
