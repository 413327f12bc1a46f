"""What an operator chooses about scheduling: the options that a server's settings and a simulated cluster share.

Each option that a core is told takes its default from that core's config, which owns it. ``actorserve.settings`` and
``actorserve.sim.cluster_table`` build their sections on these, and ``actorserve.core_configs`` maps them to the cores'
configs. Units stand in the names.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.cluster.scaling import ScalingConfig
from actorserve.core.gateway.config import GatewayConfig
from actorserve.core.instance.config import InstanceConfig
from actorserve.core.migration.config import MigrationConfig
from actorserve.core.migration.pairing import PairingConfig
from actorserve.core.scheduling.token_budget import MIN_PREFILL_TOKENS

MIN_PERIOD_S: Final = 1e-3  # a shorter period would keep a process busy with nothing else
MAX_S: Final = 31 * 86_400.0
MAX_COUNT: Final = 10**9
MAX_WORKERS: Final = 1024  # of one server

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Period = Annotated[float, Field(ge=MIN_PERIOD_S, le=MAX_S, allow_inf_nan=False)]
PeriodOrInf = Annotated[float, Field(ge=MIN_PERIOD_S, allow_inf_nan=True)]
Freeness = Annotated[float, Field(ge=-MAX_COUNT, le=MAX_COUNT, allow_inf_nan=False)]

Policy = Literal["skip_join_mlfq", "fcfs", "naive_mlfq", "fixed_priority", "srpt", "fcfs_reserving"]


def default_of(config: type[Any], name: str) -> Any:
    """The default of a field of a core's config. Raises: TypeError where it has none, or one made by a factory."""
    default = next(each.default for each in fields(config) if each.name == name)
    if default is MISSING:
        raise TypeError(f"{config.__name__}.{name} has no default")
    return default


def parse_priority(text: str) -> int | None:
    """A priority class, as TOML and JSON name a key; None where the text is no whole number of 32 bits."""
    is_number = text.removeprefix("-").isdecimal() and len(text) <= 11
    return int(text) if is_number and -(2**31) <= int(text) < 2**31 else None


class Options(BaseModel):
    """Unknown names are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SchedulingOptions(Options):
    """How each worker schedules its requests."""

    tokens_per_block: int = Field(16, ge=1, le=1024, description="tokens that share a block of the KV cache")
    max_batch_requests: Count = Field(
        default_of(InstanceConfig, "max_batch_requests"), description="most requests in one iteration of a worker"
    )
    max_batch_tokens: Count = Field(
        default_of(InstanceConfig, "max_batch_tokens"),
        description="most prefill and decode tokens in one iteration of a worker",
    )
    tpot_target_s: float = Field(
        default_of(InstanceConfig, "tpot_target_s"),
        gt=0,
        allow_inf_nan=True,
        description="prefill chunks are so short that iterations with decodes take at most this time; inf: no target",
    )
    prefix_cache: bool = Field(
        default_of(InstanceConfig, "prefix_cache"), description="reuse the KV of prompts that begin with equal tokens"
    )
    policy: Policy = Field("skip_join_mlfq", description="the order of requests on a worker")
    promote_after_s: PeriodOrInf = Field(
        default_of(ClusterConfig, "promote_after_s"),
        description="a request that has waited this long is promoted to the top of its feedback queue; inf: never",
    )
    promote_after_by_priority_s: dict[int, PeriodOrInf] = Field(
        default_factory=dict, description="promote_after_s of requests of some priorities; {}: the same for all"
    )
    min_share: float = Field(
        default_of(ClusterConfig, "min_share"),
        ge=0,
        lt=1,
        description="share of the computing time that is left to requests of less urgent priority",
    )
    swap: Literal["proactive", "reactive", "recompute"] = Field(
        default_of(InstanceConfig, "swap_mode").value,
        description="what becomes of a preempted request's KV: copied to the host early, at need, or dropped",
    )
    max_queue_per_instance: Count = Field(
        default_of(ClusterConfig, "max_queue_per_instance"),
        description="most requests that wait on one worker for their first iteration; more wait at the coordinator",
    )
    headroom_tokens_by_priority: dict[int, Annotated[int, Field(ge=0, le=MAX_COUNT)]] = Field(
        default_factory=dict, description="KV tokens that count as used beside requests of some priorities; {}: none"
    )

    @model_validator(mode="before")
    @classmethod
    def _read_priorities(cls, values: Any) -> Any:
        """TOML and JSON have texts as keys."""
        if not isinstance(values, Mapping):
            return values
        read = dict(values)
        for option in ("promote_after_by_priority_s", "headroom_tokens_by_priority"):
            given = read.get(option)
            if isinstance(given, Mapping):
                read[option] = {_priority(option, key, value): value for key, value in given.items()}
        return read

    @model_validator(mode="after")
    def _check_scheduling(self) -> Self:
        for name in ("tpot_target_s", "promote_after_s"):
            if math.isnan(getattr(self, name)):
                raise ValueError(f"{name} is nan: expected a time, or inf")
        for priority, seconds in self.promote_after_by_priority_s.items():
            if math.isnan(seconds):
                raise ValueError(f"promote_after_by_priority_s.{priority} is nan: expected a time, or inf")
        least = self.max_batch_requests + MIN_PREFILL_TOKENS
        if self.max_batch_tokens < least:
            raise ValueError(
                f"max_batch_tokens is {self.max_batch_tokens}: expected at least max_batch_requests + "
                f"{MIN_PREFILL_TOKENS} = {least}, so that prompts enter beside a full batch"
            )
        return self


class ClusterOptions(Options):
    """How requests find a worker, and how often processes talk to each other."""

    load_report_s: Period = Field(
        default_of(InstanceConfig, "load_report_s"), description="time between two load reports of a worker"
    )
    retry_s: Period = Field(
        default_of(ClusterConfig, "retry_s"), description="time after which an unanswered message is sent again"
    )
    death_after_s: Period = Field(2.0, description="a process that has been silent for this time counts as dead")
    max_waiting_requests: Count = Field(
        default_of(ClusterConfig, "max_waiting_requests"),
        description="most requests that wait at the coordinator for a worker; more are refused",
    )
    dispatch: Literal["freeness", "least_loaded", "round_robin"] = Field(
        default_of(ClusterConfig, "dispatch"), description="which worker a request goes to"
    )
    late_binding: bool = Field(
        default_of(ClusterConfig, "late_binding"),
        description="whether a request waits at the coordinator until a worker has room for it",
    )
    round_s: Period = Field(
        default_of(ClusterConfig, "round_s"), description="time between two decisions about migration and scaling"
    )
    no_instance_timeout_s: Period = Field(
        default_of(GatewayConfig, "no_instance_timeout_s"),
        description="a new request that no worker could take for this time is refused",
    )
    resume_timeout_s: Period = Field(
        default_of(GatewayConfig, "resume_timeout_s"),
        description="a request whose client has part of the answer fails after this time without a worker",
    )


class MigrationOptions(Options):
    """Which worker moves requests to which. Bounds are a worker's freeness, in iterations: how many tokens each of its
    requests can still generate before the worker's KV memory is full.
    """

    enabled: bool = Field(True, description="whether running requests move from worker to worker")
    source_below: Freeness = Field(
        default_of(PairingConfig, "source_below"), description="a worker with less freeness moves requests away"
    )
    source_until: Freeness = Field(
        default_of(PairingConfig, "source_until"), description="freeness at which such a worker stops"
    )
    destination_above: Freeness = Field(
        default_of(PairingConfig, "destination_above"), description="a worker with more freeness may receive requests"
    )
    rest_s: Period = Field(
        default_of(PairingConfig, "rest_s"),
        description="time in which a worker that sent does not receive, and one that received does not send",
    )
    max_moves: Count = Field(
        default_of(PairingConfig, "max_moves"), description="most pairs of workers that move requests at once"
    )
    mode: Literal["live", "blocking", "recompute"] = Field(
        default_of(MigrationConfig, "mode").value, description="how a request moves"
    )
    max_outgoing: Count = Field(
        default_of(MigrationConfig, "max_outgoing"), description="most requests that leave one worker at once"
    )
    timeout_s: Period = Field(
        default_of(MigrationConfig, "timeout_s"),
        description="time that the other worker may take for a step, in addition to the copying",
    )
    bytes_per_s: float | None = Field(
        default_of(MigrationConfig, "bytes_per_s"),
        ge=1.0,
        le=1e15,
        allow_inf_nan=False,
        description="most KV bytes per second that a worker reads from one other; default: 32 MiB/s on CPUs, else all",
    )
    checkpoint_tokens: int = Field(
        default_of(InstanceConfig, "checkpoint_tokens"),
        ge=0,
        le=MAX_COUNT,
        description="new tokens of a request after which another worker copies its KV; 0: no checkpoints",
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if not self.source_below <= self.source_until <= self.destination_above:
            raise ValueError(
                f"source_until is {self.source_until:g}: expected a number from {self.source_below:g} (source_below) "
                f"to {self.destination_above:g} (destination_above), or requests would go to and fro"
            )
        return self


class ScalingOptions(Options):
    """How many workers there are: as many as at the start, or between two bounds as the load asks."""

    min_workers: int | None = Field(
        None, ge=1, le=MAX_WORKERS, description="fewest workers; default: one. Needs max_workers"
    )
    max_workers: int | None = Field(
        None, ge=1, le=MAX_WORKERS, description="most workers; default: the number of workers stays as it is"
    )
    scale_out_below: Freeness = Field(
        default_of(ScalingConfig, "scale_out_below"),
        description="a worker is started when the mean freeness, in iterations, stays below this bound",
    )
    scale_in_above: Freeness = Field(
        default_of(ScalingConfig, "scale_in_above"),
        description="a worker is stopped when the mean freeness, in iterations, stays above this bound",
    )
    hold_s: Period = Field(
        default_of(ScalingConfig, "hold_s"), description="time that the mean freeness has to stay beyond a bound"
    )
    start_timeout_s: Period = Field(
        default_of(ScalingConfig, "start_timeout_s"),
        description="a worker that has not reported this long after its start was ordered counts as failed",
    )

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        if self.max_workers is None:
            if self.min_workers is not None:
                raise ValueError("min_workers bounds a number that is fixed: set max_workers as well")
        elif (self.min_workers or 1) > self.max_workers:
            raise ValueError(f"min_workers is {self.min_workers}: expected at most {self.max_workers} (max_workers)")
        if not self.scale_out_below < self.scale_in_above:
            raise ValueError(
                f"scale_out_below is {self.scale_out_below:g}: expected less than scale_in_above, which is "
                f"{self.scale_in_above:g}"
            )
        return self


def _priority(option: str, key: Any, value: Any) -> int:
    priority = parse_priority(key) if isinstance(key, str) else key
    if type(priority) is not int or not -(2**31) <= priority < 2**31:
        shown = str(key) if str(key).isprintable() else repr(key)
        unit = "tokens" if "tokens" in option else "seconds"
        raise ValueError(f"{option}.{shown[:60]} is {value}: expected a whole number of 32 bits = {unit}")
    return priority
