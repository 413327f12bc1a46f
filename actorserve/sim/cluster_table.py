"""The simulated cluster as a run's configuration describes it, checked."""

import math
from typing import Annotated, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from actorserve.core.kv.block_allocator import blocks_for
from actorserve.sim.tables import Table
from actorserve.sim.traces import MAX_TRACE_TOKENS

Policy = Literal["skip_join_mlfq", "fcfs", "naive_mlfq", "fixed_priority", "srpt", "fcfs_reserving"]
MAX_S: Final = 31 * 86_400.0  # of virtual time
MIN_PERIOD_S: Final = 1e-3  # of what goes on and on
MAX_COUNT: Final = 10**9
_MAX_BLOCKS: Final = 10**8  # of all instances: each is held in memory
_MAX_INSTANCES: Final = 10_000

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Period = Annotated[float, Field(ge=MIN_PERIOD_S, le=MAX_S)]
Freeness = Annotated[float, Field(ge=-MAX_COUNT, le=MAX_COUNT)]
Lengths = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]


def require_path(name: str, value: str) -> None:
    if "\0" in value:
        raise ValueError(f"{name} is {value[:60]!r}: expected a path, without NUL characters")


def parse_priority(text: str) -> int | None:
    """A priority class, as TOML names a key; None where it is none."""
    is_number = text.removeprefix("-").isdecimal() and len(text) <= 11
    return int(text) if is_number and -(2**31) <= int(text) < 2**31 else None


class PairingTable(Table):
    """Which instances move requests to which (``core.migration.pairing``), and what a move may take
    (``core.migration.source``).
    """

    source_below: Freeness = 32.0
    source_until: Freeness = 64.0
    destination_above: Freeness = 128.0
    order_ttl_s: Period = 1.0
    rest_s: float = Field(2.0, ge=0, le=MAX_S)
    max_moves: Count = 64
    max_outgoing: Count = 4
    timeout_s: Period = 2.0
    bytes_per_s: float | None = Field(
        None, ge=1.0, le=1e15, description="that copies to an instance take at most while their requests go on"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.source_below <= self.source_until <= self.destination_above:
            raise ValueError(
                f"source_until is {self.source_until:g}: expected a number from {self.source_below:g} (source_below) "
                f"to {self.destination_above:g} (destination_above)"
            )
        return self


class ScalingTable(Table):
    """How many instances there are (``core.cluster.scaling``); one that is started is there after ``warm_up_s``."""

    max_instances: int = Field(ge=1, le=_MAX_INSTANCES)
    min_instances: int = Field(1, ge=1, le=_MAX_INSTANCES)
    scale_out_below: Freeness = 64.0
    scale_in_above: Freeness = 512.0
    hold_s: Period = 5.0
    warm_up_s: float = Field(10.0, ge=0, le=MAX_S)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_instances > self.max_instances:
            raise ValueError(f"min_instances is {self.min_instances}: expected at most {self.max_instances}")
        if not self.scale_out_below < self.scale_in_above:
            raise ValueError(
                f"scale_out_below is {self.scale_out_below:g}: expected less than scale_in_above, which is "
                f"{self.scale_in_above:g}"
            )
        return self


class ClusterTable(Table):
    """The instances, all alike, and the processes around them. Defaults are those of ``config/actorserve.toml``, but
    that requests stay where they are.
    """

    profile: str = Field(min_length=1, description="the name of a shipped profile, or a file")
    instances: int = Field(1, ge=1, le=_MAX_INSTANCES)
    policy: Policy = "skip_join_mlfq"
    promote_after_s: float = Field(0.3, ge=MIN_PERIOD_S, allow_inf_nan=True)
    min_share: float = Field(0.1, ge=0, lt=1)
    swap: Literal["proactive", "reactive", "recompute"] = "proactive"
    dispatch: Literal["freeness", "least_loaded", "round_robin"] = "freeness"
    late_binding: bool = Field(True, description="whether requests wait in the cluster until an instance has room")
    round_s: Period = 0.25
    migration: Literal["off", "live", "blocking", "recompute"] = "off"
    pairing: PairingTable = PairingTable()
    scaling: ScalingTable | None = None
    headroom_tokens: dict[str, int] = Field(
        default_factory=dict, description="kept free beside the requests of a priority, by priority"
    )
    kv_tokens: int = Field(ge=1, le=MAX_COUNT, description="tokens whose KV the device's pool of an instance holds")
    host_kv_tokens: int = Field(0, ge=0, le=MAX_COUNT, description="the same, of the pool on its host")
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
    max_waiting_requests: int = Field(4096, ge=1, le=MAX_COUNT, description="at the coordinator; more are refused")
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

    @property
    def max_instances(self) -> int:
        return self.instances if self.scaling is None else max(self.instances, self.scaling.max_instances)

    @model_validator(mode="after")
    def _check(self) -> Self:
        require_path("profile", self.profile)
        for name in ("tpot_target_s", "promote_after_s"):
            if math.isnan(getattr(self, name)):
                raise ValueError(f"{name} is nan: expected a time, or inf")
        if self.num_blocks < blocks_for(2, self.tokens_per_block):
            raise ValueError(f"kv_tokens is {self.kv_tokens}: expected at least a block of {self.tokens_per_block}")
        num_blocks = self.max_instances * (self.num_blocks + self.num_host_blocks)
        if num_blocks > _MAX_BLOCKS:
            raise ValueError(
                f"tokens_per_block is {self.tokens_per_block}: it makes {num_blocks} blocks of kv_tokens and "
                f"host_kv_tokens, on all instances: expected at most {_MAX_BLOCKS}"
            )
        for name, num_tokens in self.headroom_tokens.items():
            if parse_priority(name) is None or not 0 <= num_tokens <= MAX_COUNT:
                shown = name if name.isprintable() else repr(name)
                raise ValueError(
                    f"headroom_tokens.{shown[:60]} is {num_tokens}: expected a whole number of 32 bits = tokens, "
                    f"0 to {MAX_COUNT}"
                )
        return self
