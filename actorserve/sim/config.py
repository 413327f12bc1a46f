"""The configuration of one simulated run, checked: cluster, arrivals, lengths, failures."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from actorserve.errors import WorkloadError
from actorserve.options import MAX_S, Count, Period, parse_priority
from actorserve.sim.cluster_table import ClusterTable, Lengths, require_path
from actorserve.sim.tables import Table, parse_table
from actorserve.sim.workload.lengths import PAIRS, parse_lengths
from actorserve.sim.workload.traces import MAX_TRACE_TOKENS

COORDINATOR = "coordinator"
MIN_RATE_PER_S: Final = 1e-4  # at a lower rate a run consists of load reports of idle instances
MAX_RATE_PER_S: Final = 1e6
_MAX_FACTORS: Final = 10_000
_MAX_CLASSES: Final = 1000
_LIMITS: Final = "three numbers above 0: the highest slowdown at P50, P90 and P99"

SlowdownLimit = Annotated[float, Field(gt=0, le=1e9)]
SlowdownLimits = tuple[SlowdownLimit, SlowdownLimit, SlowdownLimit]


class CycleTable(Table):
    """A rate that cycles, as over a day: it is multiplied by one factor after the other, each for ``each_s``,
    repeatedly.
    """

    factors: tuple[float, ...] = Field(strict=False, min_length=1, max_length=_MAX_FACTORS)
    each_s: Period

    @model_validator(mode="after")
    def _check(self) -> Self:
        for place, factor in enumerate(self.factors):
            if not 1e-3 <= factor <= 1e3:
                raise ValueError(f"factors.{place} is {factor:g}: expected a number from 0.001 to 1000")
        return self


class SpikeTable(Table):
    """For ``duration_s`` the rate is multiplied by ``factor``. The cluster has recovered when all requests that arrived
    before the spike's end have their first token.
    """

    at_s: float = Field(ge=0, le=MAX_S)
    duration_s: Period
    factor: float = Field(ge=1e-3, le=1e3)


class ArrivalsTable(Table):
    """When requests arrive."""

    process: Literal["poisson", "gamma", "regular", "trace"] = "poisson"
    rate_per_s: float | None = Field(None, ge=MIN_RATE_PER_S, le=MAX_RATE_PER_S)
    cv: float | None = Field(
        None, ge=0.01, le=100, description="standard deviation over mean of the gaps of a gamma process"
    )
    time_scale: float = Field(
        1.0, ge=1e-6, le=1e6, description="factor on a trace's times; with 0.5 requests arrive twice as fast"
    )
    cycle: CycleTable | None = None
    spike: SpikeTable | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.process == "gamma" and self.cv is None:
            raise ValueError("cv is missing: expected a number above 0, for a gamma process")
        if self.process != "gamma" and self.cv is not None:
            raise ValueError(f"cv is {self.cv}: expected only with process = 'gamma'")
        if self.process == "trace" and self.rate_per_s is not None:
            raise ValueError(f"rate_per_s is {self.rate_per_s}: expected none if the trace gives the times")
        if self.process == "trace" and (self.cycle is not None or self.spike is not None):
            raise ValueError("cycle and spike are not expected if the trace gives the times")
        if self.cycle is not None and self.spike is not None:
            raise ValueError("spike is not expected together with cycle")
        return self


class LengthClassTable(Table):
    """One of several classes of requests, as of an application: how long they are, and what their prompts share."""

    share: float = Field(gt=0, le=1e6, description="share of the requests, by the sum of all classes' shares")
    prompt: Lengths = Field(description="a length, or a distribution, of the whole prompt")
    output: Lengths = Field(description="a length, or a distribution")
    prefix_tokens: int = Field(
        0, ge=0, le=MAX_TRACE_TOKENS, description="number of tokens with which all prompts of the class begin"
    )


class LengthsTable(Table):
    """How long requests are: ``like`` a known workload, or by two distributions, ``prompt`` and ``output``, or by
    classes.
    """

    like: str | None = Field(None, description=f"{', '.join(PAIRS)}, or trace")
    together: bool = Field(
        True,
        description="whether a request's prompt and output come from one row of the trace; false: from two random rows",
    )
    prompt: Lengths | None = Field(None, description="a length, or a distribution")
    output: Lengths | None = Field(None, description="a length, or a distribution")
    classes: tuple[LengthClassTable, ...] = Field(
        (), strict=False, max_length=_MAX_CLASSES, description="classes of requests, in place of prompt and output"
    )
    turn_s: Period | None = Field(
        None,
        description="with classes: they take turns, each for this time, in place of a random class for each request",
    )
    ratio: float | None = Field(
        None,
        ge=1e-4,
        le=1e4,
        description="mean prompt length over mean output length; the mean of their sum stays the same",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.like is not None and self.like not in PAIRS and self.like != "trace":
            raise ValueError(f"like is {self.like!r}: expected {', '.join(PAIRS)}, or trace")
        if self.like is not None and not self.prompt is self.output is None:
            raise ValueError("prompt and output are not expected together with like")
        if self.turn_s is not None and len(self.classes) < 2:
            raise ValueError(f"turn_s is {self.turn_s:g}: expected only with two or more classes, which take turns")
        if self.classes:
            for name in ("like", "prompt", "output", "ratio"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is not expected together with classes")
        elif self.like is None and (self.prompt is None or self.output is None):
            raise ValueError("like is missing: expected it, or prompt and output, or classes")
        if not self.together and self.like != "trace":
            raise ValueError("together is false: expected only with like = 'trace'")
        named = [("prompt", self.prompt), ("output", self.output)]
        for place, class_ in enumerate(self.classes):
            named += [(f"classes.{place}.prompt", class_.prompt), (f"classes.{place}.output", class_.output)]
        for name, spec in named:
            try:
                if spec is not None:
                    parse_lengths(spec)
            except WorkloadError as error:
                raise ValueError(f"{name}: {error}") from None
        return self


class PrefixesTable(Table):
    """Prompts begin with one of ``count`` texts of ``tokens`` tokens each (as system prompts do), chosen at random."""

    count: Count
    tokens: int = Field(ge=1, le=MAX_TRACE_TOKENS)


class FailureTable(Table):
    """A process is killed, and started again at ``restart_at_s``, or never."""

    process: str = Field(pattern=r"^(coordinator|worker-[0-9]{1,9})$", description="coordinator, or worker-N")
    at_s: float = Field(ge=0, le=MAX_S)
    restart_at_s: float | None = Field(None, ge=0, le=MAX_S)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.restart_at_s is not None and self.restart_at_s < self.at_s:
            raise ValueError(f"restart_at_s is {self.restart_at_s}: expected a time after at_s, which is {self.at_s}")
        return self


class SloTable(Table):
    """Limits on slowdowns at P50, P90 and P99: a request's time over its time alone on an unloaded machine. The
    defaults are Splitwise's table of SLOs (section 5).
    """

    reference: str = Field(min_length=1, description="the profile of the unloaded machine: a shipped one, or a file")
    ttft: SlowdownLimits = Field((2.0, 3.0, 6.0), strict=False, description=_LIMITS)
    tbt: SlowdownLimits = Field((1.25, 1.5, 5.0), strict=False, description=_LIMITS)
    e2e: SlowdownLimits = Field((1.25, 1.5, 5.0), strict=False, description=_LIMITS)
    max_growth: float = Field(
        1.1,
        ge=1.0,
        le=100.0,
        description="by how much a median slowdown may grow from the first half of the arrivals to the second",
    )

    @property
    def limits(self) -> dict[str, SlowdownLimits]:
        """By the slowdown's name in figures."""
        return {"ttft": self.ttft, "tbt": self.tbt, "e2e": self.e2e}

    @model_validator(mode="after")
    def _check(self) -> Self:
        require_path("reference", self.reference)
        return self


class RunConfig(Table):
    """One run. ``priorities`` are shares of the requests by class; arrivals end after ``duration_s`` or
    ``num_requests``, whichever comes first, and all requests that arrived are served to the end.
    """

    seed: int = Field(0, ge=-(2**63), le=2**63 - 1)
    duration_s: float | None = Field(None, gt=0, le=MAX_S)
    num_requests: Count | None = None
    drain_limit_s: float = Field(
        36_000.0,
        gt=0,
        le=MAX_S,
        description="time after the last arrival at which requests that still run count as unfinished",
    )
    trace: str | None = Field(None, description="a CSV file of lengths and times, as Azure publishes them")
    cluster: ClusterTable
    arrivals: ArrivalsTable = ArrivalsTable()
    lengths: LengthsTable
    prefixes: PrefixesTable | None = None
    priorities: dict[str, float] = Field(default_factory=lambda: {"0": 1.0}, min_length=1)
    failures: tuple[FailureTable, ...] = Field((), strict=False)
    slo: SloTable | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.trace is not None:
            require_path("trace", self.trace)
        if self.trace is None and (self.arrivals.process == "trace" or self.lengths.like == "trace"):
            raise ValueError("trace is missing: expected a CSV file")
        if self.trace is not None and self.arrivals.process != "trace" and self.lengths.like != "trace":
            raise ValueError(f"trace is {self.trace!r}: expected with arrivals.process or lengths.like = 'trace'")
        if self.duration_s is None and self.num_requests is None and self.arrivals.process != "trace":
            raise ValueError("duration_s is missing: expected it, or num_requests")
        if self.prefixes is not None and not self.cluster.prefix_cache:
            raise ValueError("prefixes have no effect: expected cluster.prefix_cache = true")
        if any(class_.prefix_tokens for class_ in self.lengths.classes):
            if not self.cluster.prefix_cache:
                raise ValueError("lengths.classes: prefix_tokens have no effect: expected cluster.prefix_cache = true")
            if self.prefixes is not None:
                raise ValueError("prefixes are not expected together with prefix_tokens of lengths.classes")
        for name, share in self.priorities.items():
            if parse_priority(name) is None or not 0 < share <= 1e6:
                shown = name if name.isprintable() else repr(name)
                raise ValueError(
                    f"priorities.{shown} is {share:g}: expected a whole number of 32 bits = a share above 0, up to 1e6"
                )
        last: dict[str, float | None] = {}
        for failure in sorted(self.failures, key=lambda failure: failure.at_s):
            name = failure.process
            if name != COORDINATOR and int(name.removeprefix("worker-")) >= self.cluster.num_workers:
                raise ValueError(
                    f"failures: there is no {name}: expected worker-0 to worker-{self.cluster.num_workers - 1}"
                )
            restarted_s = last.get(name, 0.0)
            if restarted_s is None or failure.at_s < restarted_s:
                raise ValueError(f"failures: {name} is killed at {failure.at_s} s, but is not running then")
            last[name] = failure.restart_at_s
        return self


def parse_run(values: Mapping[str, Any], place: str) -> RunConfig:
    """``place`` names the file in errors. Raises: SimulationError, in one line that names the key."""
    return parse_table(RunConfig, values, place)
