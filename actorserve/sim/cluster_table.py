"""The simulated cluster as a run's configuration describes it, checked."""

from dataclasses import replace
from typing import Annotated, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from actorserve.core.kv.block_allocator import rows_for
from actorserve.core.timing.profile import Curve, Link, Profile
from actorserve.options import (
    MAX_COUNT,
    MAX_S,
    ClusterOptions,
    MigrationOptions,
    PoolsOptions,
    RoleName,
    ScalingOptions,
    SchedulingOptions,
)
from actorserve.sim.power.machine_power import PowerTable
from actorserve.sim.step_costs import CostsTable
from actorserve.sim.tables import Table
from actorserve.sim.workload.traces import MAX_TRACE_TOKENS

_MAX_BLOCKS: Final = 10**8  # of all instances together, because the simulator holds an entry for each block
_MAX_INSTANCES: Final = 10_000
_MAX_GROUPS: Final = 100
_OF_ONE_GROUP: Final = ("profile", "instances", "kv_tokens", "host_kv_tokens")  # keys that groups have themselves

_PROFILE: Final = "the name of a shipped profile, or a file"
_KV_TOKENS: Final = "tokens whose KV fits into an instance's device memory"
_HOST_KV_TOKENS: Final = "tokens whose KV fits into the host memory that an instance swaps to"

Lengths = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]


def _times(curve: Curve, factor: float) -> Curve:
    return Curve(curve.xs, tuple([y * factor for y in curve.ys]))


def slowed(profile: Profile, prefill_factor: float, decode_factor: float) -> Profile:
    """The profile, with its iterations so many times as long."""
    if prefill_factor == decode_factor == 1.0:
        return profile
    return replace(
        profile,
        prefill=_times(profile.prefill, prefill_factor),
        prefill_context_s=profile.prefill_context_s * prefill_factor,
        decode=_times(profile.decode, decode_factor),
        decode_context=_times(profile.decode_context, decode_factor),
    )


def require_path(name: str, value: str) -> None:
    if "\0" in value:
        raise ValueError(f"{name} is {value[:60]!r}: expected a path, without NUL characters")


class MigrationTable(Table, MigrationOptions):
    """Migration between simulated instances; off by default."""

    enabled: bool = Field(False, description="whether running requests move from instance to instance")


class ScalingTable(Table, ScalingOptions):
    """How many instances there are."""

    group: str | None = Field(
        None,
        description="the name of the group whose instances are started; default: the only one, or, if all groups have "
        "different roles, the one with the new instance's role",
    )
    warm_up_s: float = Field(
        10.0, ge=0, le=MAX_S, description="time from the order to start an instance until it is up"
    )


class PoolsTable(Table, PoolsOptions):
    """How prompts and their answers are divided between groups."""


class LinksTable(Table):
    """The links between the machines of instances."""

    rule: Literal["in_turn", "shared", "apart"] = Field(
        "in_turn",
        description="in_turn: one copy after another, each with the whole bandwidth; shared: copies at the same time "
        "share it; apart: each copy has it for itself, as if there were no others",
    )
    bytes_per_s: float | None = Field(
        None, ge=1, le=1e18, description="bandwidth of each machine's link; default: the profile's"
    )

    def applied_to(self, profile: Profile) -> Profile:
        """The profile, with the bandwidth of these links."""
        if self.bytes_per_s is None:
            return profile
        return replace(profile, transfer=Link(profile.transfer.latency_s, self.bytes_per_s))


class GroupTable(Table):
    """Instances that are alike. ``cost_per_hour`` and ``watts``, if known, are those of one instance's machine."""

    name: str = Field(pattern=r"^[a-z0-9-]{1,40}$", description="a name, of small letters, digits and -")
    count: int = Field(ge=1, le=_MAX_INSTANCES, description="number of instances at the start")
    profile: str = Field(min_length=1, description=_PROFILE)
    role: RoleName = Field("mixed", description="what its instances compute: prompts, the tokens after them, or both")
    kv_tokens: int = Field(ge=1, le=MAX_COUNT, description=_KV_TOKENS)
    host_kv_tokens: int = Field(0, ge=0, le=MAX_COUNT, description=_HOST_KV_TOKENS)
    cost_per_hour: float | None = Field(None, ge=0, le=1e9, description="cost of a machine per hour, in any currency")
    watts: float | None = Field(None, ge=0, le=1e9, description="average power of a machine, in watts")
    prefill_factor: float = Field(1.0, ge=1, le=1000, description="factor on prompts' times, as of a power cap")
    decode_factor: float = Field(1.0, ge=1, le=1000, description="factor on decodes' times, as of a power cap")
    cap: float | None = Field(
        None,
        gt=0,
        le=1,
        description="power cap at the start, as a share of watts, with the effect that power.curves say",
    )

    def slowed(self, profile: Profile) -> Profile:
        """The profile, with its iterations as much longer as these factors say."""
        return slowed(profile, self.prefill_factor, self.decode_factor)


class ClusterTable(Table, SchedulingOptions, ClusterOptions):
    """The instances and the processes around them. Options that a server's settings also have use the same names and,
    except ``migration.enabled`` and ``prefix_cache``, the same defaults.

    The instances are described by ``groups``, or, if all are alike, by ``profile``, ``instances``, ``kv_tokens`` and
    ``host_kv_tokens``.
    """

    profile: str | None = Field(None, min_length=1, description=_PROFILE)
    instances: int = Field(1, ge=1, le=_MAX_INSTANCES, description="number of instances at the start")
    kv_tokens: int | None = Field(None, ge=1, le=MAX_COUNT, description=_KV_TOKENS)
    host_kv_tokens: int = Field(0, ge=0, le=MAX_COUNT, description=_HOST_KV_TOKENS)
    groups: tuple[GroupTable, ...] = Field(
        (), strict=False, max_length=_MAX_GROUPS, description="groups of instances that are alike, in place of profile"
    )
    migration: MigrationTable = MigrationTable()
    pools: PoolsTable = PoolsTable()
    scaling: ScalingTable = ScalingTable()
    costs: CostsTable = CostsTable()
    links: LinksTable = LinksTable()
    power: PowerTable = PowerTable()
    max_context_tokens: int = Field(
        ge=2, le=MAX_TRACE_TOKENS, description="prompt and output of the longest request; longer ones are cut"
    )
    prefix_cache: bool = Field(
        False,
        description="reuse the KV of prompts with equal prefixes; without it no two prompts share one",
    )
    length_error: float | None = Field(
        None,
        ge=0,
        le=10,
        description="with the policy shortest_expected: outputs' lengths are known but for a lognormal error, whose "
        "logarithm has this standard deviation; default: they are learned from the requests that ended",
    )
    whole_prompts: bool = Field(
        False,
        description="whether a prompt is never cut, as in older schedulers: prompts share an iteration up to "
        "max_batch_tokens, a longer prompt has one for itself, decodes get the tokens that they leave, but wait for "
        "promote_after_s at most, and tpot_target_s does not bound them",
    )
    report_changes: bool = Field(
        False,
        description="whether an instance also reports its load when a prompt was computed or a request has ended, as "
        "in simulators whose dispatcher knows the queues as they are",
    )
    network_s: float = Field(0.0005, ge=0, le=10.0, description="time of a message from one process to another")
    step_overhead_s: float | None = Field(
        None, ge=0, le=3600.0, description="pause of an engine before each iteration; default: the profile's"
    )
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
        """The number of instances at the start."""
        return sum(group.count for group in self.all_groups)

    @property
    def all_groups(self) -> tuple[GroupTable, ...]:
        """The groups; one if all instances are alike."""
        if self.groups:
            return self.groups
        assert self.profile is not None
        assert self.kv_tokens is not None
        alike = GroupTable(
            name="all",
            count=self.instances,
            profile=self.profile,
            kv_tokens=self.kv_tokens,
            host_kv_tokens=self.host_kv_tokens,
        )
        return (alike,)

    @property
    def scaled_groups(self) -> tuple[GroupTable, ...]:
        """The groups whose instances scaling starts."""
        named = tuple([group for group in self.all_groups if group.name == self.scaling.group])
        return named or self.all_groups

    def scaled_group(self, role: str | None) -> GroupTable:
        """The group of an instance that scaling starts for this role; None: for no certain role."""
        with_role = (group for group in self.scaled_groups if group.role == role)
        return next(with_role, self.scaled_groups[0])

    def group_of(self, number: int) -> GroupTable:
        """The group of worker ``number`` of those that run from the start. The first workers are those of the first
        group, and so on.
        """
        for group in self.all_groups:
            if number < group.count:
                return group
            number -= group.count
        raise ValueError(f"there are fewer workers at the start than worker-{number}")

    def num_blocks(self, group: GroupTable) -> int:
        """Blocks of the device memory of each of its instances."""
        return group.kv_tokens // self.tokens_per_block

    def num_host_blocks(self, group: GroupTable) -> int:
        return group.host_kv_tokens // self.tokens_per_block

    def max_tokens_of(self, group: GroupTable) -> int:
        """Prompt and output of the largest request that its instances serve."""
        return min(self.max_context_tokens, self.num_blocks(group) * self.tokens_per_block)

    @property
    def max_tokens(self) -> int:
        """Prompt and output of the largest request that any instance serves."""
        return max(map(self.max_tokens_of, self.all_groups))

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        if not self.groups:
            if "groups" in self.model_fields_set:
                raise ValueError("groups is empty: expected at least one")
            for name in ("profile", "kv_tokens"):
                if getattr(self, name) is None:
                    raise ValueError(f"{name} is missing: expected {type(self).model_fields[name].description}")
        for name in _OF_ONE_GROUP if self.groups else ():
            if name in self.model_fields_set:
                raise ValueError(f"{name} is not expected together with groups, which have it themselves")
        names = [group.name for group in self.all_groups]
        for place, name in enumerate(names):
            if name in names[:place]:
                raise ValueError(f"groups.{place}.name is {name!r}: expected another name than those before it")
        for name in ("cost_per_hour", "watts"):
            missing = [place for place, group in enumerate(self.groups) if getattr(group, name) is None]
            if 0 < len(missing) < len(self.groups):
                raise ValueError(f"groups.{missing[0]}.{name} is missing: expected it in all groups, or in none")
        for place, group in enumerate(self.all_groups):
            if self.power.curves is None and group.cap is not None:
                raise ValueError(f"groups.{place}.cap is {group.cap:g}: expected only with power.curves")
            if self.power.curves is not None and not group.watts:
                raise ValueError(f"groups.{place}.watts is missing: expected it with power.curves")
            if not self.costs.are_of_profile and self.costs.lookup_of(group.profile) is None:
                raise ValueError(
                    f"costs.lookups has no table for the profile of group {place}, {group.profile[:60]!r}: expected "
                    "one, because the rule splitwise_sim looks times up there"
                )
        known = ", ".join(names)
        if self.scaling.group is not None and self.scaling.group not in names:
            raise ValueError(f"scaling.group is {self.scaling.group[:60]!r}: expected one of {known}")
        if self.scaling.group is not None and self.scaling.max_workers is None:
            raise ValueError(f"scaling.group is {self.scaling.group!r}: expected only with scaling.max_workers")
        roles = {group.role for group in self.all_groups}
        if self.scaling.group is None and self.scaling.max_workers is not None and len(names) > len(roles):
            raise ValueError(f"scaling.group is missing: expected one of {known}, because groups have equal roles")
        return self

    @model_validator(mode="after")
    def _check_memory(self) -> Self:
        num_more = max(0, (self.scaling.max_workers or 0) - self.num_workers)
        num_blocks = num_more * max([self._num_all_blocks(group) for group in self.scaled_groups])
        for place, group in enumerate(self.all_groups):
            key = f"groups.{place}." if self.groups else ""
            require_path(f"{key}profile", group.profile)
            if self.num_blocks(group) < rows_for(2, self.tokens_per_block):
                least = f"at least a block of {self.tokens_per_block}"
                raise ValueError(f"{key}kv_tokens is {group.kv_tokens}: expected {least}")
            num_blocks += group.count * self._num_all_blocks(group)
        if num_blocks > _MAX_BLOCKS:
            raise ValueError(
                f"tokens_per_block is {self.tokens_per_block}: it makes {num_blocks} blocks of kv_tokens and "
                f"host_kv_tokens, on all instances: expected at most {_MAX_BLOCKS}"
            )
        if self.num_workers > _MAX_INSTANCES:
            raise ValueError(f"groups have {self.num_workers} instances: expected at most {_MAX_INSTANCES}")
        return self

    def _num_all_blocks(self, group: GroupTable) -> int:
        return self.num_blocks(group) + self.num_host_blocks(group)
