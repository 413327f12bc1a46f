"""What one simulated run is made of, checked: cluster, arrivals, lengths, failures. ``tools/simulate`` reads it."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from actorserve.core.blocks import blocks_for
from actorserve.errors import WorkloadError
from actorserve.sim.lengths import PAIRS, parse_lengths
from actorserve.sim.tables import Table, parse_table
from actorserve.sim.traces import MAX_TRACE_TOKENS

Policy = Literal["skip_join_mlfq", "fcfs", "naive_mlfq", "fixed_priority", "srpt", "fcfs_reserving"]
COORDINATOR = "coordinator"
MIN_RATE_PER_S: Final = 1e-4  # below it a run is all idle instances' reports
MAX_RATE_PER_S: Final = 1e6
_MAX_S: Final = 31 * 86_400.0  # of virtual time
_MIN_PERIOD_S: Final = 1e-3  # of what goes on and on
_MAX_COUNT: Final = 10**9
_MAX_BLOCKS: Final = 10**8  # of all instances: each is held in memory

Count = Annotated[int, Field(ge=1, le=_MAX_COUNT)]
Period = Annotated[float, Field(ge=_MIN_PERIOD_S, le=_MAX_S)]
Lengths = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]


def _require_path(name: str, value: str) -> None:
    if "\0" in value:
        raise ValueError(f"{name} is {value[:60]!r}: expected a path, without NUL characters")


class ClusterTable(Table):
    """The instances, all alike, and the processes around them. Defaults are those of ``config/actorserve.toml``."""

    profile: str = Field(min_length=1, description="the name of a shipped profile, or a file")
    instances: int = Field(1, ge=1, le=10_000)
    policy: Policy = "skip_join_mlfq"
    promote_after_s: float = Field(0.3, ge=_MIN_PERIOD_S, allow_inf_nan=True)
    min_share: float = Field(0.1, ge=0, lt=1)
    swap: Literal["proactive", "reactive", "recompute"] = "proactive"
    kv_tokens: int = Field(ge=1, le=_MAX_COUNT, description="tokens whose KV the device's pool of an instance holds")
    host_kv_tokens: int = Field(0, ge=0, le=_MAX_COUNT, description="the same, of the pool on its host")
    tokens_per_block: Count = 16
    max_context_tokens: int = Field(
        ge=2, le=MAX_TRACE_TOKENS, description="prompt and output of the longest request; longer ones are cut"
    )
    max_batch_requests: Count = 64
    max_batch_tokens: Count = 512
    tpot_target_s: float = Field(0.1, gt=0, allow_inf_nan=True)
    prefix_cache: bool = False
    load_report_s: Period = 0.2
    retry_s: Period = 1.0
    death_after_s: Period = 2.0
    max_waiting_requests: int = Field(4096, ge=1, le=_MAX_COUNT, description="at the coordinator; more are refused")
    max_queue_per_instance: Count = 64
    no_instance_timeout_s: Period = 30.0
    resume_timeout_s: Period = 600.0
    network_s: float = Field(0.0005, ge=0, le=10.0, description="from one process to another")
    step_overhead_s: float = Field(0.0, ge=0, le=3600.0, description="from one iteration to the next")
    copy_slowdown: float = Field(
        0.0, ge=0, le=100, description="what copies beside an iteration make it longer, as a share"
    )
    noise: float = Field(0.0, ge=0, le=1, description="deviation of an iteration's duration, as a share")

    @property
    def num_blocks(self) -> int:
        return self.kv_tokens // self.tokens_per_block

    @property
    def num_host_blocks(self) -> int:
        return self.host_kv_tokens // self.tokens_per_block

    @property
    def max_tokens(self) -> int:
        """Prompt and output of the largest request that an instance serves."""
        return min(self.max_context_tokens, self.num_blocks * self.tokens_per_block)

    @model_validator(mode="after")
    def _check(self) -> Self:
        _require_path("profile", self.profile)
        for name in ("tpot_target_s", "promote_after_s"):
            if math.isnan(getattr(self, name)):
                raise ValueError(f"{name} is nan: expected a time, or inf")
        if self.num_blocks < blocks_for(2, self.tokens_per_block):
            raise ValueError(f"kv_tokens is {self.kv_tokens}: expected at least a block of {self.tokens_per_block}")
        num_blocks = self.instances * (self.num_blocks + self.num_host_blocks)
        if num_blocks > _MAX_BLOCKS:
            raise ValueError(
                f"tokens_per_block is {self.tokens_per_block}: it makes {num_blocks} blocks of kv_tokens and "
                f"host_kv_tokens, on all instances: expected at most {_MAX_BLOCKS}"
            )
        return self


class ArrivalsTable(Table):
    """When requests come."""

    process: Literal["poisson", "gamma", "regular", "trace"] = "poisson"
    rate_per_s: float | None = Field(None, ge=MIN_RATE_PER_S, le=MAX_RATE_PER_S)
    cv: float | None = Field(None, ge=0.01, le=100, description="of a gamma process: deviation over mean of its gaps")
    time_scale: float = Field(1.0, ge=1e-6, le=1e6, description="of a trace's times; 0.5 is twice as fast")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.process == "gamma" and self.cv is None:
            raise ValueError("cv is missing: expected a number above 0, for a gamma process")
        if self.process != "gamma" and self.cv is not None:
            raise ValueError(f"cv is {self.cv}: expected only with process = 'gamma'")
        if self.process == "trace" and self.rate_per_s is not None:
            raise ValueError(f"rate_per_s is {self.rate_per_s}: expected none where the trace says when requests come")
        return self


class LengthsTable(Table):
    """How long requests are: ``like`` something known, or ``prompt`` and ``output`` each as a distribution."""

    like: str | None = Field(None, description=f"{', '.join(PAIRS)}, or trace")
    prompt: Lengths | None = Field(None, description="a length, or a distribution")
    output: Lengths | None = Field(None, description="a length, or a distribution")
    ratio: float | None = Field(
        None, ge=1e-4, le=1e4, description="of prompt to output, in the mean; that of their sum is kept"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.like is not None and self.like not in PAIRS and self.like != "trace":
            raise ValueError(f"like is {self.like!r}: expected {', '.join(PAIRS)}, or trace")
        if self.like is not None and not self.prompt is self.output is None:
            raise ValueError("prompt and output are not expected beside like")
        if self.like is None and (self.prompt is None or self.output is None):
            raise ValueError("like is missing: expected it, or prompt and output")
        for name, spec in (("prompt", self.prompt), ("output", self.output)):
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
    """A process is killed, and started again after a while, or never."""

    process: str = Field(pattern=r"^(coordinator|worker-[0-9]{1,9})$", description="coordinator, or worker-N")
    at_s: float = Field(ge=0, le=_MAX_S)
    restart_at_s: float | None = Field(None, ge=0, le=_MAX_S)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.restart_at_s is not None and self.restart_at_s < self.at_s:
            raise ValueError(f"restart_at_s is {self.restart_at_s}: expected it after at_s, which is {self.at_s}")
        return self


class RunConfig(Table):
    """One run. ``priorities`` are shares of the requests by class; arrivals end after ``duration_s`` or
    ``num_requests``, whichever comes first, and all that came are served to the end.
    """

    seed: int = Field(0, ge=-(2**63), le=2**63 - 1)
    duration_s: float | None = Field(None, gt=0, le=_MAX_S)
    num_requests: Count | None = None
    drain_limit_s: float = Field(
        36_000.0, gt=0, le=_MAX_S, description="after the last arrival; what still runs is unfinished"
    )
    trace: str | None = Field(None, description="a CSV file of lengths and times, as Azure publishes them")
    cluster: ClusterTable
    arrivals: ArrivalsTable = ArrivalsTable()
    lengths: LengthsTable
    prefixes: PrefixesTable | None = None
    priorities: dict[str, float] = Field(default_factory=lambda: {"0": 1.0}, min_length=1)
    failures: tuple[FailureTable, ...] = Field((), strict=False)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.trace is not None:
            _require_path("trace", self.trace)
        if self.trace is None and (self.arrivals.process == "trace" or self.lengths.like == "trace"):
            raise ValueError("trace is missing: expected a CSV file")
        if self.trace is not None and self.arrivals.process != "trace" and self.lengths.like != "trace":
            raise ValueError(f"trace is {self.trace!r}: expected with arrivals.process or lengths.like = 'trace'")
        if self.duration_s is None and self.num_requests is None and self.arrivals.process != "trace":
            raise ValueError("duration_s is missing: expected it, or num_requests")
        if self.prefixes is not None and not self.cluster.prefix_cache:
            raise ValueError("prefixes are of no use: expected cluster.prefix_cache = true")
        for name, share in self.priorities.items():
            is_priority = name.removeprefix("-").isdecimal() and len(name) <= 11 and -(2**31) <= int(name) < 2**31
            if not is_priority or not 0 < share <= 1e6:
                shown = name if name.isprintable() else repr(name)
                raise ValueError(
                    f"priorities.{shown} is {share:g}: expected a whole number of 32 bits = a share above 0, up to 1e6"
                )
        last: dict[str, float | None] = {}
        for failure in sorted(self.failures, key=lambda each: each.at_s):
            name = failure.process
            if name != COORDINATOR and int(name.removeprefix("worker-")) >= self.cluster.instances:
                raise ValueError(
                    f"failures: there is no {name}: expected worker-0 to worker-{self.cluster.instances - 1}"
                )
            restarted_s = last.get(name, 0.0)
            if restarted_s is None or failure.at_s < restarted_s:
                raise ValueError(f"failures: {name} is killed at {failure.at_s} s, when it is dead: expected it alive")
            last[name] = failure.restart_at_s
        return self


def parse_run(values: Mapping[str, Any], place: str) -> RunConfig:
    """``place`` names the file in errors. Raises: SimulationError, in one line that names the key."""
    return parse_table(RunConfig, values, place)
