"""What one simulated run is made of, checked: cluster, arrivals, lengths, failures. ``tools/simulate`` reads it."""

import math
from collections.abc import Mapping
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from actorserve.core.blocks import blocks_for
from actorserve.errors import SimulationError
from actorserve.sim.lengths import PAIRS

Policy = Literal["skip_join_mlfq", "fcfs", "naive_mlfq", "fixed_priority", "srpt", "fcfs_reserving"]
COORDINATOR = "coordinator"
_T = TypeVar("_T", bound="Table")


class Table(BaseModel):
    """A table of the file: unknown keys and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ClusterTable(Table):
    """The instances, all alike, and the processes around them. Defaults are those of ``config/actorserve.toml``."""

    profile: str = Field(min_length=1, description="the name of a shipped profile, or a file")
    instances: int = Field(1, ge=1, le=100_000)
    policy: Policy = "skip_join_mlfq"
    promote_after_s: float = Field(0.3, gt=0, allow_inf_nan=True)
    min_share: float = Field(0.1, ge=0, lt=1)
    swap: Literal["proactive", "reactive", "recompute"] = "proactive"
    kv_tokens: int = Field(ge=1, description="tokens whose KV the device's pool of an instance holds")
    host_kv_tokens: int = Field(0, ge=0, description="the same, of the pool on its host")
    tokens_per_block: int = Field(16, ge=1)
    max_context_tokens: int = Field(ge=2, description="prompt and output of the longest request; longer ones are cut")
    max_batch_requests: int = Field(64, ge=1)
    max_batch_tokens: int = Field(512, ge=1)
    tpot_target_s: float = Field(0.1, gt=0, allow_inf_nan=True)
    prefix_cache: bool = False
    load_report_s: float = Field(0.2, gt=0)
    retry_s: float = Field(1.0, gt=0)
    death_after_s: float = Field(2.0, gt=0)
    max_waiting_requests: int = Field(4096, ge=1, description="at the coordinator; more are refused")
    max_queue_per_instance: int = Field(64, ge=1)
    no_instance_timeout_s: float = Field(30.0, gt=0)
    resume_timeout_s: float = Field(600.0, gt=0)
    network_s: float = Field(0.0005, ge=0, description="from one process to another")
    step_overhead_s: float = Field(0.0, ge=0, description="from one iteration to the next")
    copy_slowdown: float = Field(0.0, ge=0, description="what copies beside an iteration make it longer, as a share")
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
        for name in ("tpot_target_s", "promote_after_s"):
            if math.isnan(getattr(self, name)):
                raise ValueError(f"{name} is nan: expected a time, or inf")
        if self.num_blocks < blocks_for(2, self.tokens_per_block):
            raise ValueError(f"kv_tokens is {self.kv_tokens}: expected at least a block of {self.tokens_per_block}")
        return self


class ArrivalsTable(Table):
    """When requests come."""

    process: Literal["poisson", "gamma", "regular", "trace"] = "poisson"
    rate_per_s: float | None = Field(None, gt=0)
    cv: float | None = Field(None, gt=0, le=100, description="of a gamma process: deviation over mean of its gaps")
    time_scale: float = Field(1.0, gt=0, description="of a trace's times; 0.5 is twice as fast")

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
    prompt: str | int | None = None
    output: str | int | None = None
    ratio: float | None = Field(None, gt=0, description="of prompt to output, in the mean; that of their sum is kept")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.like is not None and self.like not in PAIRS and self.like != "trace":
            raise ValueError(f"like is {self.like!r}: expected {', '.join(PAIRS)}, or trace")
        if self.like is not None and not self.prompt is self.output is None:
            raise ValueError("prompt and output are not expected beside like")
        if self.like is None and (self.prompt is None or self.output is None):
            raise ValueError("like is missing: expected it, or prompt and output")
        return self


class PrefixesTable(Table):
    """Prompts begin with one of ``count`` texts of ``tokens`` tokens each (as system prompts do), chosen at random."""

    count: int = Field(ge=1)
    tokens: int = Field(ge=1)


class FailureTable(Table):
    """A process is killed, and started again after a while, or never."""

    process: str = Field(pattern=r"^(coordinator|worker-[0-9]+)$")
    at_s: float = Field(ge=0)
    restart_at_s: float | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.restart_at_s is not None and self.restart_at_s < self.at_s:
            raise ValueError(f"restart_at_s is {self.restart_at_s}: expected it after at_s, which is {self.at_s}")
        return self


class RunConfig(Table):
    """One run. ``priorities`` are shares of the requests by class; arrivals end after ``duration_s`` or
    ``num_requests``, whichever comes first, and all that came are served to the end.
    """

    seed: int = 0
    duration_s: float | None = Field(None, gt=0)
    num_requests: int | None = Field(None, ge=1)
    drain_limit_s: float = Field(36_000.0, gt=0, description="after the last arrival; what still runs is unfinished")
    trace: str | None = Field(None, description="a CSV file of lengths and times, as Azure publishes them")
    cluster: ClusterTable
    arrivals: ArrivalsTable = ArrivalsTable()
    lengths: LengthsTable
    prefixes: PrefixesTable | None = None
    priorities: dict[str, float] = Field(default_factory=lambda: {"0": 1.0})
    failures: tuple[FailureTable, ...] = Field((), strict=False)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.trace is None and (self.arrivals.process == "trace" or self.lengths.like == "trace"):
            raise ValueError("trace is missing: expected a CSV file")
        if self.trace is not None and self.arrivals.process != "trace" and self.lengths.like != "trace":
            raise ValueError(f"trace is {self.trace!r}: expected with arrivals.process or lengths.like = 'trace'")
        if self.duration_s is None and self.num_requests is None and self.arrivals.process != "trace":
            raise ValueError("duration_s is missing: expected it, or num_requests")
        if self.prefixes is not None and not self.cluster.prefix_cache:
            raise ValueError("prefixes are of no use: expected cluster.prefix_cache = true")
        for name, share in self.priorities.items():
            if not name.removeprefix("-").isdecimal() or not math.isfinite(share) or share <= 0:
                raise ValueError(f"priorities.{name} is {share}: expected a whole number = a share above 0")
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


def parse_table(model: type[_T], values: Mapping[str, Any], place: str) -> _T:
    """Raises: SimulationError, in one line that names the key and says what was expected."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise SimulationError(f"{place}: {_first_problem(error, model)}") from None


def _first_problem(error: ValidationError, model: type[Table]) -> str:
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"])
    match problem["type"]:
        case "extra_forbidden":
            return f"{key} is unknown: expected {', '.join(_known(model, problem['loc'][:-1]))}"
        case "missing":
            return f"{key} is missing: expected {_expected(model, problem['loc'])}"
        case "value_error":
            told = problem["msg"].removeprefix("Value error, ")
            return f"{key}.{told}" if key else told
    told = problem["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return f"{key} is {str(problem['input'])[:60]!r}: expected {told}"


def _table(model: type[Table], path: tuple[int | str, ...]) -> type[Table] | None:
    """The model of the table at this place."""
    for part in path:
        if isinstance(part, int):
            continue
        inner = model.model_fields.get(part)
        if inner is None:
            return None
        found = [each for each in _types(inner.annotation) if isinstance(each, type) and issubclass(each, Table)]
        if not found:
            return None
        model = found[0]
    return model


def _types(annotation: Any) -> list[Any]:
    arguments = getattr(annotation, "__args__", ())
    return [annotation, *(inner for each in arguments for inner in _types(each))]


def _known(model: type[Table], path: tuple[int | str, ...]) -> list[str]:
    table = _table(model, path)
    return sorted(table.model_fields) if table is not None else ["none"]


def _expected(model: type[Table], path: tuple[int | str, ...]) -> str:
    table = _table(model, path[:-1])
    field = table.model_fields.get(str(path[-1])) if table is not None else None
    if field is None:
        return "a value"
    return field.description or ("a table" if _table(model, path) is not None else "a value")
