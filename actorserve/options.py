"""The scheduling options of an operator, which a server's settings and a simulated cluster share.

An option that goes into a core's config takes its default from that config. ``actorserve.settings`` and
``actorserve.sim.cluster_table`` build their sections on these, and ``actorserve.core_configs`` maps them to the cores'
configs. Units stand in the names.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.cluster.scaling import ScalingConfig
from actorserve.core.gateway.config import GatewayConfig
from actorserve.core.instance.config import InstanceConfig
from actorserve.core.migration.config import MigrationConfig
from actorserve.core.migration.pairing import PairingConfig
from actorserve.core.pools.config import PoolsConfig
from actorserve.core.scheduling.token_budget import MIN_PREFILL_TOKENS

MIN_PERIOD_S: Final = 1e-3  # with a shorter period, a process would have no time for other work
MAX_S: Final = 31 * 86_400.0
MAX_COUNT: Final = 10**9
MAX_WORKERS: Final = 1024  # of one server
_LARGE_GPU_BYTES: Final = 35 * 2**30

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Period = Annotated[float, Field(ge=MIN_PERIOD_S, le=MAX_S, allow_inf_nan=False)]
PeriodOrInf = Annotated[float, Field(ge=MIN_PERIOD_S, allow_inf_nan=True)]
Freeness = Annotated[float, Field(ge=-MAX_COUNT, le=MAX_COUNT, allow_inf_nan=False)]

RoleName = Literal["mixed", "prompt", "token"]
Policy = Literal[
    "skip_join_mlfq",
    "shortest_expected",
    "fcfs",
    "naive_mlfq",
    "fixed_priority",
    "srpt",
    "fcfs_reserving",
    "paper_skip_join_mlfq",
]


def default_of(config: type[Any], name: str) -> Any:
    """The default of a field of a core's config. Raises: TypeError if it has none, or one made by a factory."""
    default = next(field.default for field in fields(config) if field.name == name)
    if default is MISSING:
        raise TypeError(f"{config.__name__}.{name} has no default")
    return default


def parse_priority(text: str) -> int | None:
    """The priority class that a key of TOML or JSON names; None if the text is not a 32-bit integer."""
    is_number = text.removeprefix("-").isdecimal() and len(text) <= 11
    return int(text) if is_number and -(2**31) <= int(text) < 2**31 else None


class BatchLimits(NamedTuple):
    """The maximum number of requests, and of prefill and decode tokens, in one iteration of a worker."""

    requests: int
    tokens: int

    def override(self, requests: int | None, tokens: int | None) -> "BatchLimits":
        """These limits with the operator's; None: not set. The other limit follows if they would not fit together.

        A full batch of decodes leaves ``MIN_PREFILL_TOKENS`` tokens for prompts, if the operator's limits do.
        """
        if requests is None:
            requests = self.requests if tokens is None else max(1, min(self.requests, tokens - MIN_PREFILL_TOKENS))
        if tokens is None:
            tokens = max(self.tokens, requests + MIN_PREFILL_TOKENS)
        return BatchLimits(requests, tokens)


CPU_LIMITS: Final = BatchLimits(
    default_of(InstanceConfig, "max_batch_requests"), default_of(InstanceConfig, "max_batch_tokens")
)


def gpu_limits(memory_bytes: int) -> BatchLimits:
    """The limits of a GPU with this memory.

    A decode reads all weights, so its time hardly depends on the number of requests until 256 or so. A prefill needs
    some thousand tokens to keep the tensor cores busy, but its activations take memory: 0.7 MB a token for a model of
    8 billion parameters, which small GPUs need for KV.
    """
    return BatchLimits(256, 8192 if memory_bytes >= _LARGE_GPU_BYTES else 2048)


class Options(BaseModel):
    """Base class of the sections; an unknown name is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SchedulingOptions(Options):
    """How each worker schedules its requests."""

    tokens_per_block: int = Field(16, ge=1, le=1024, description="number of tokens in one block of the KV cache")
    max_batch_requests: Count | None = Field(
        None, description="maximum number of requests in one iteration of a worker; default: 64 on CPUs, 256 on GPUs"
    )
    max_batch_tokens: Count | None = Field(
        None,
        description="maximum number of prefill and decode tokens in one iteration of a worker; default: 512 on CPUs, "
        "8192 on GPUs with 35 GiB or more, 2048 on smaller GPUs",
    )
    tpot_target_s: float = Field(
        default_of(InstanceConfig, "tpot_target_s"),
        gt=0,
        allow_inf_nan=True,
        description="longest time of an iteration with decodes, which bounds the prefill chunks in it; inf: no bound",
    )
    run_ahead: bool = Field(
        default_of(InstanceConfig, "run_ahead"),
        description="whether a worker plans an iteration while the one before it runs",
    )
    prefix_cache: bool = Field(
        default_of(InstanceConfig, "prefix_cache"),
        description="whether prompts that begin with the same tokens share the KV of those tokens",
    )
    policy: Policy = Field("skip_join_mlfq", description="the order of requests on a worker")
    promote_after_s: PeriodOrInf = Field(
        default_of(ClusterConfig, "promote_after_s"),
        description="waiting time after which a request moves to the top of its feedback queue; inf: never",
    )
    promote_after_by_priority_s: dict[int, PeriodOrInf] = Field(
        default_factory=dict,
        description="priority -> promote_after_s for requests of that priority; {}: promote_after_s applies to all",
    )
    min_share: float = Field(
        default_of(ClusterConfig, "min_share"),
        ge=0,
        lt=1,
        description="share of the computing time (0 to 1) that requests of less urgent priorities get in any case",
    )
    swap: Literal["proactive", "reactive", "recompute"] = Field(
        default_of(InstanceConfig, "swap_mode").value,
        description="a preempted request's KV is copied to the host in advance, copied on demand, or dropped",
    )
    max_queue_per_instance: Count = Field(
        default_of(ClusterConfig, "max_queue_per_instance"),
        description="maximum number of requests that wait on one worker for their first iteration",
    )
    headroom_tokens_by_priority: dict[int, Annotated[int, Field(ge=0, le=MAX_COUNT)]] = Field(
        default_factory=dict,
        description="priority -> KV tokens that count as used on a worker that runs such requests; {}: none",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_priorities(cls, values: Any) -> Any:
        """Turn the keys into integers, because TOML and JSON keys are strings."""
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
        least = (self.max_batch_requests or 1) + MIN_PREFILL_TOKENS
        if self.max_batch_tokens is not None and self.max_batch_tokens < least:
            raise ValueError(
                f"max_batch_tokens is {self.max_batch_tokens}: expected at least max_batch_requests + "
                f"{MIN_PREFILL_TOKENS} = {least}, so that a full batch leaves tokens for prompts"
            )
        return self

    def batch_limits(self, usual: BatchLimits = CPU_LIMITS) -> BatchLimits:
        """The largest iteration; ``usual``: the limits of the device, where the operator set none."""
        return usual.override(self.max_batch_requests, self.max_batch_tokens)


class ClusterOptions(Options):
    """How requests get a worker, and how often processes send messages to each other."""

    load_report_s: Period = Field(
        default_of(InstanceConfig, "load_report_s"), description="time between two load reports of a worker"
    )
    retry_s: Period = Field(
        default_of(ClusterConfig, "retry_s"), description="time after which an unanswered message is sent again"
    )
    death_after_s: Period = Field(2.0, description="a process that has been silent for this time counts as dead")
    max_waiting_requests: Count = Field(
        default_of(ClusterConfig, "max_waiting_requests"),
        description="maximum number of requests that wait at the coordinator; further requests are refused",
    )
    dispatch: Literal["freeness", "shortest_queue", "least_loaded", "round_robin"] = Field(
        default_of(ClusterConfig, "dispatch"), description="the rule that chooses a request's worker"
    )
    late_binding: bool = Field(
        default_of(ClusterConfig, "late_binding"),
        description="whether a request waits at the coordinator until a worker has free KV blocks for it",
    )
    round_s: Period = Field(
        default_of(ClusterConfig, "round_s"), description="time between two decisions about migration and scaling"
    )
    no_instance_timeout_s: PeriodOrInf = Field(
        default_of(GatewayConfig, "no_instance_timeout_s"),
        description="a new request is refused if no worker could accept it for this time; inf: never",
    )
    resume_timeout_s: PeriodOrInf = Field(
        default_of(GatewayConfig, "resume_timeout_s"),
        description="a request that has already sent part of its answer fails after this time without one; inf: never",
    )


class MigrationOptions(Options):
    """When requests migrate between workers. The bounds are freeness in iterations: how many more tokens every request
    on a worker can generate before the worker's KV memory is full.
    """

    enabled: bool = Field(True, description="whether running requests may migrate between workers")
    source_below: Freeness = Field(
        default_of(PairingConfig, "source_below"),
        description="freeness below which a worker begins to migrate requests away",
    )
    source_until: Freeness = Field(
        default_of(PairingConfig, "source_until"),
        description="freeness at which a worker stops migrating requests away",
    )
    destination_above: Freeness = Field(
        default_of(PairingConfig, "destination_above"),
        description="freeness above which a worker may receive migrating requests",
    )
    rest_s: Period = Field(
        default_of(PairingConfig, "rest_s"),
        description="time after a migration in which its source receives no requests and its destination sends none",
    )
    max_moves: Count = Field(
        default_of(PairingConfig, "max_moves"),
        description="maximum number of pairs of workers that migrate requests at once",
    )
    mode: Literal["live", "blocking", "recompute"] = Field(
        default_of(MigrationConfig, "mode").value, description="how a request migrates"
    )
    layer_copies: Literal["profitable", "always", "never", "after"] = Field(
        default_of(MigrationConfig, "layer_copies").value,
        description="whether the KV of a prompt's last chunk, which another worker continues, is copied layer by layer "
        "while it is computed",
    )
    max_outgoing: Count = Field(
        default_of(MigrationConfig, "max_outgoing"),
        description="maximum number of requests that migrate away from one worker at once",
    )
    timeout_s: Period = Field(
        default_of(MigrationConfig, "timeout_s"),
        description="longest time that the other worker may take for a step of a migration, excluding the copying",
    )
    bytes_per_s: float | None = Field(
        default_of(MigrationConfig, "bytes_per_s"),
        ge=1.0,
        le=1e15,
        allow_inf_nan=False,
        description="maximum KV bytes per second from a worker to another; default: 32 MiB/s on CPUs, else no limit",
    )
    checkpoint_tokens: int = Field(
        default_of(InstanceConfig, "checkpoint_tokens"),
        ge=0,
        le=MAX_COUNT,
        description="number of new tokens of a request after which another worker copies its KV; 0: no checkpoints",
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if not self.source_below <= self.source_until <= self.destination_above:
            raise ValueError(
                f"source_until is {self.source_until:g}: expected a number from {self.source_below:g} (source_below) "
                f"to {self.destination_above:g} (destination_above), or requests would move back and forth"
            )
        return self


class PoolsOptions(Options):
    """How prompts and their answers are divided between workers that compute only one of them."""

    max_pending_tokens: Count = Field(
        default_of(PoolsConfig, "max_pending_tokens"),
        description="prompt tokens in the shortest queue above which a worker outside the prompt pool may help",
    )
    max_prompt_tokens: Count = Field(
        default_of(InstanceConfig, "max_prompt_tokens"),
        description="maximum number of prompt tokens in an iteration of a prompt worker",
    )
    hold_s: Period = Field(
        default_of(PoolsConfig, "hold_s"),
        description="how long a worker that helps another pool does so at least",
    )
    across_kinds: bool = Field(
        default_of(PoolsConfig, "across_kinds"),
        description="whether an answer may be computed by another kind of worker than its prompt",
    )
    follow_load: bool = Field(
        default_of(PoolsConfig, "follow_load"),
        description="whether workers change between prompts and answers as the load needs",
    )


class ScalingOptions(Options):
    """How many workers run: as many as at the start, or a number between two bounds that follows the load."""

    min_workers: int | None = Field(
        None, ge=1, le=MAX_WORKERS, description="minimum number of workers; default: one. It needs max_workers"
    )
    max_workers: int | None = Field(
        None,
        ge=1,
        le=MAX_WORKERS,
        description="maximum number of workers; default: the number of workers never changes",
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
        default_of(ScalingConfig, "hold_s"),
        description="how long the mean freeness must stay beyond a bound before a worker is started or stopped",
    )
    start_timeout_s: PeriodOrInf = Field(
        default_of(ScalingConfig, "start_timeout_s"),
        description="time after which a start counts as failed if the new worker has not reported; inf: never",
    )

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        if self.max_workers is None:
            if self.min_workers is not None:
                raise ValueError("min_workers has no effect without max_workers: set max_workers as well")
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
