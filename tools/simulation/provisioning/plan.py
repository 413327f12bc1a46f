"""What is searched: designs of clusters, each of one or two groups of machines, at one load."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, model_validator

from actorserve.errors import SimulationError
from actorserve.sim.config import MAX_RATE_PER_S, MIN_RATE_PER_S
from actorserve.sim.tables import Table, parse_table
from tools.simulation.experiment import Case, experiment_of, merged, read_values

KEY: Final = "provision"
_MAX_DESIGNS = 100
_MAX_MACHINES = 1000

Measure = Literal["cost", "watts"]


class SizedGroup(Table):
    """A group of machines of one kind. Its size is searched from ``low`` to ``high``, in steps."""

    name: str = Field(min_length=1, description="the group's name")
    machine: str = Field(min_length=1, description="a machine type of config/machines.toml")
    role: str | None = Field(None, description="the role of its instances; default: mixed")
    low: int = Field(1, ge=1, le=_MAX_MACHINES)
    high: int = Field(ge=1, le=_MAX_MACHINES)
    step: int = Field(1, ge=1, le=_MAX_MACHINES)

    @property
    def counts(self) -> list[int]:
        return list(range(self.low, self.high + 1, self.step))

    @model_validator(mode="after")
    def _check(self) -> "SizedGroup":
        if self.high < self.low:
            raise ValueError(f"high is {self.high}: expected at least low, which is {self.low}")
        return self


class DesignTable(Table):
    name: str = Field(min_length=1, max_length=60)
    label: str | None = None
    groups: tuple[SizedGroup, ...] = Field(strict=False, min_length=1, max_length=2)
    cluster: dict[str, Any] = Field(default_factory=dict, description="keys of the cluster that differ in this design")

    @property
    def title(self) -> str:
        return self.label or self.name


class ProvisionTable(Table):
    """The load, and the designs. ``least`` is what the best cluster has least of. Most of the seeds, which are the
    run's own one and the ``edge_seeds``, must hold a size on the frontier.
    """

    rate_per_s: float = Field(ge=MIN_RATE_PER_S, le=MAX_RATE_PER_S)
    least: Measure = "cost"
    edge_seeds: tuple[int, ...] = Field((), strict=False, max_length=100)
    designs: tuple[DesignTable, ...] = Field(strict=False, min_length=1, max_length=_MAX_DESIGNS)

    @model_validator(mode="after")
    def _check(self) -> "ProvisionTable":
        names = [design.name for design in self.designs]
        for place, name in enumerate(names):
            if name in names[:place]:
                raise ValueError(f"designs.{place}.name is {name!r}: expected another name than those before it")
        return self


@dataclass(frozen=True)
class Design:
    """A design, and its case with the largest sizes."""

    table: DesignTable
    case: Case

    def sized(self, counts: Sequence[int]) -> Case:
        """The case with so many machines in each group."""
        cluster = self.case.config.cluster
        groups = tuple(
            group.model_copy(update={"count": count}) for group, count in zip(cluster.groups, counts, strict=True)
        )
        config = self.case.config.model_copy(update={"cluster": cluster.model_copy(update={"groups": groups})})
        return replace(self.case, config=config)

    def cost_per_hour(self, counts: Sequence[int]) -> float:
        groups = self.case.config.cluster.groups
        return sum(count * (group.cost_per_hour or 0.0) for group, count in zip(groups, counts, strict=True))

    def watts(self, counts: Sequence[int]) -> float:
        groups = self.case.config.cluster.groups
        return sum(count * (group.watts or 0.0) for group, count in zip(groups, counts, strict=True))


@dataclass(frozen=True)
class Provisioning:
    name: str
    table: ProvisionTable
    designs: list[Design]


def read_provisioning(file: Path, overrides: Mapping[str, Any]) -> Provisioning:
    """Raises: SimulationError, ProfileError, WorkloadError; each one line that names the file and the key."""
    values = read_values(file, overrides)
    if KEY not in values:
        raise SimulationError(f"{file}: {KEY} is missing: expected a table with rate_per_s and designs")
    table = parse_table(ProvisionTable, {KEY: values.pop(KEY)}[KEY], f"{file}: {KEY}")
    for key in ("arms", "variants", "rates", "search", "seeds"):
        if key in values:
            raise SimulationError(f"{file}: {key} is not expected together with {KEY}")
    designs = []
    for design in table.designs:
        groups = [
            {"name": group.name, "machine": group.machine, "count": group.counts[-1]}
            | ({} if group.role is None else {"role": group.role})
            for group in design.groups
        ]
        cluster = merged(design.cluster, {"groups": groups})
        (case,) = experiment_of(file, merged(values, {"cluster": cluster, "rates": [table.rate_per_s]}), {}).cases
        if case.config.slo is None:
            raise SimulationError(f"{file}: slo is missing: expected the service levels that the clusters hold")
        designs.append(Design(design, replace(case, arm=design.name)))
    return Provisioning(file.stem, table, designs)
