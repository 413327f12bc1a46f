"""The simulated cluster as a run's configuration describes it, checked."""

from typing import Annotated, Final, Self

from pydantic import BeforeValidator, Field, model_validator

from actorserve.core.kv.block_allocator import blocks_for
from actorserve.options import (
    MAX_COUNT,
    MAX_S,
    ClusterOptions,
    MigrationOptions,
    ScalingOptions,
    SchedulingOptions,
)
from actorserve.sim.tables import Table
from actorserve.sim.workload.traces import MAX_TRACE_TOKENS

_MAX_BLOCKS: Final = 10**8  # of all instances together, because the simulator holds an entry for each block
_MAX_INSTANCES: Final = 10_000

Lengths = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]


def require_path(name: str, value: str) -> None:
    if "\0" in value:
        raise ValueError(f"{name} is {value[:60]!r}: expected a path, without NUL characters")


class MigrationTable(Table, MigrationOptions):
    """Migration between simulated instances; off by default."""

    enabled: bool = Field(False, description="whether running requests move from instance to instance")


class ScalingTable(Table, ScalingOptions):
    """How many instances there are."""

    warm_up_s: float = Field(
        10.0, ge=0, le=MAX_S, description="time from the order to start an instance until it is up"
    )


class ClusterTable(Table, SchedulingOptions, ClusterOptions):
    """The instances, all alike, and the processes around them. Options that a server's settings also have use the
    same names and, except ``migration.enabled`` and ``prefix_cache``, the same defaults.
    """

    profile: str = Field(min_length=1, description="the name of a shipped profile, or a file")
    instances: int = Field(1, ge=1, le=_MAX_INSTANCES, description="number of instances at the start")
    migration: MigrationTable = MigrationTable()
    scaling: ScalingTable = ScalingTable()
    kv_tokens: int = Field(ge=1, le=MAX_COUNT, description="tokens whose KV fits into an instance's device memory")
    host_kv_tokens: int = Field(
        0, ge=0, le=MAX_COUNT, description="tokens whose KV fits into the host memory that an instance swaps to"
    )
    max_context_tokens: int = Field(
        ge=2, le=MAX_TRACE_TOKENS, description="prompt and output of the longest request; longer ones are cut"
    )
    prefix_cache: bool = Field(
        False,
        description="reuse the KV of prompts with equal prefixes; without it no two prompts share one",
    )
    network_s: float = Field(0.0005, ge=0, le=10.0, description="time of a message from one process to another")
    step_overhead_s: float = Field(0.0, ge=0, le=3600.0, description="pause of an engine before each iteration")
    copy_slowdown: float = Field(
        0.0, ge=0, le=100, description="share by which concurrent KV copies lengthen an iteration"
    )
    noise: float = Field(0.0, ge=0, le=1, description="standard deviation of an iteration's duration, as a share of it")

    @property
    def workers(self) -> SchedulingOptions:
        """This table holds the options of a server's section [workers]."""
        return self

    @property
    def cluster(self) -> ClusterOptions:
        """This table holds the options of a server's section [cluster]."""
        return self

    @property
    def num_workers(self) -> int:
        return self.instances

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
        return max(self.instances, self.scaling.max_workers or 0)

    @model_validator(mode="after")
    def _check_memory(self) -> Self:
        require_path("profile", self.profile)
        if self.num_blocks < blocks_for(2, self.tokens_per_block):
            raise ValueError(f"kv_tokens is {self.kv_tokens}: expected at least a block of {self.tokens_per_block}")
        num_blocks = self.max_instances * (self.num_blocks + self.num_host_blocks)
        if num_blocks > _MAX_BLOCKS:
            raise ValueError(
                f"tokens_per_block is {self.tokens_per_block}: it makes {num_blocks} blocks of kv_tokens and "
                f"host_kv_tokens, on all instances: expected at most {_MAX_BLOCKS}"
            )
        return self
