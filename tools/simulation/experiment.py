"""An experiment: one file that describes many runs. Its arms are compared, each on all of its variants."""

import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from actorserve.core.timing.profile import Profile
from actorserve.errors import ActorserveError, SimulationError
from actorserve.options import Period
from actorserve.profile_files import load_profile
from actorserve.sim.arrivals import arrivals
from actorserve.sim.cluster_table import ClusterTable
from actorserve.sim.config import MAX_RATE_PER_S, MIN_RATE_PER_S, RunConfig, parse_run
from actorserve.sim.measures.slowdown import Reference, ServiceLevels
from actorserve.sim.statistics import PERCENTILES
from actorserve.sim.tables import Table, parse_table
from actorserve.sim.workload.traces import TraceRow, read_trace
from tools.simulation.figures import ROOTS
from tools.simulation.machines import PROFILES, Machines, read_machines

_MAX_X = 1e12
_MAX_SEEDS = 1000
_MAX_RATES = 100_000
SLO = "slo"
_METRICS = ("ttft_s", "tpot_s", "tbt_s", "e2e_s", "per_token_s")
_FIGURES = ("mean", "max", *(f"p{percent}" for percent in PERCENTILES))


class Goal(Table):
    """A rate is held if ``metric`` (as ``per_token_s.p95``) is at most ``limit`` and every request completes. With the
    metric ``slo`` no limit of the run's service levels may be broken.
    """

    metric: str
    limit: float | None = Field(None, gt=0, description="the highest value of metric, in seconds")

    @property
    def name(self) -> str:
        return self.metric if self.limit is None else f"{self.metric} <= {self.limit:g}"

    @model_validator(mode="after")
    def _check(self) -> "Goal":
        if self.metric == SLO:
            if self.limit is not None:
                raise ValueError(f"limit is {self.limit:g}: expected none, because slo has limits of its own")
            return self
        if self.limit is None:
            raise ValueError(f"limit is missing: expected {Goal.model_fields['limit'].description}")
        latency, _, figure = self.metric.partition(".")
        if latency not in _METRICS or figure not in _FIGURES:
            raise ValueError(f"metric is {self.metric!r}: expected one of {', '.join(_METRICS)}, a dot, and a figure")
        return self


class Search(Table):
    """For each arm the highest rate that holds each goal, out of ``low``, ``low`` x ``step``, ... up to ``high``.
    With ``step_per_s`` the rates are ``low``, ``low`` + ``step_per_s``, ...

    Found by bisection, which assumes that latency grows with the rate. With ``edge_seeds`` the run is repeated with
    each of these seeds near the rate that was found, and a rate is held if most of the seeds, the run's own included,
    hold it. With ``bracket_s`` the bisection's runs have arrivals of this time alone, because a shorter run is enough
    to come near that rate; from there on whole runs decide. Arms are compared at the highest rate of the arm
    ``compare_at``.
    """

    low: float = Field(ge=MIN_RATE_PER_S, le=MAX_RATE_PER_S)
    high: float = Field(ge=MIN_RATE_PER_S, le=MAX_RATE_PER_S)
    step: float = Field(1.05, ge=1.001, le=10.0)
    step_per_s: float | None = Field(None, ge=MIN_RATE_PER_S, le=MAX_RATE_PER_S)
    edge_seeds: tuple[int, ...] = Field((), strict=False, max_length=_MAX_SEEDS)
    bracket_s: Period | None = None
    goals: tuple[Goal, ...] = Field(strict=False, min_length=1)
    compare_at: str | None = None

    @model_validator(mode="after")
    def _check(self) -> "Search":
        if self.high < self.low:
            raise ValueError(f"high is {self.high}: expected at least low, which is {self.low}")
        if self.step_per_s is not None:
            if "step" in self.model_fields_set:
                raise ValueError("step is not expected together with step_per_s")
            if self.high - self.low > _MAX_RATES * self.step_per_s:
                raise ValueError(f"step_per_s is {self.step_per_s:g}: expected at most {_MAX_RATES} steps up to high")
        return self

    def is_highest(self, rate_per_s: float) -> bool:
        """Whether no higher rate is tried."""
        above = rate_per_s * self.step if self.step_per_s is None else rate_per_s + self.step_per_s
        return above > self.high

    def rates(self) -> list[float]:
        """The rates out of which the held one is found, growing."""
        if self.step_per_s is not None:
            num_steps = math.floor((self.high - self.low) / self.step_per_s * (1.0 + 1e-9))
            return [float(f"{self.low + place * self.step_per_s:.6g}") for place in range(num_steps + 1)]
        rates = [self.low]
        while rates[-1] * self.step <= self.high * (1.0 + 1e-9):
            rates.append(rates[-1] * self.step)
        return [float(f"{rate:.6g}") for rate in rates]


class Plan(Table):
    """The keys of an experiment that are not keys of its runs. ``figures`` are shown, and plotted by rate, by the
    variants' x, by the figure ``plot_by``, or else as bars; ``plot_by = "occupancy"`` plots iterations' tokens over
    time. ``labels`` name figures; ``label`` names an arm or variant. All of it is run with each of the ``seeds``, if
    there are any, and tables show medians and the spread.
    """

    title: str = ""
    figures: tuple[str, ...] = Field((), strict=False)
    labels: dict[str, str] = Field(default_factory=dict)
    plot_by: str | None = None
    rates: tuple[float, ...] = Field((), strict=False)
    seeds: tuple[int, ...] = Field((), strict=False, max_length=_MAX_SEEDS)
    search: Search | None = None
    arms: tuple[dict[str, Any], ...] = Field((), strict=False)
    variants: tuple[dict[str, Any], ...] = Field((), strict=False)

    @model_validator(mode="after")
    def _check(self) -> "Plan":
        for name, tables in (("arms", self.arms), ("variants", self.variants)):
            names = [table.get("name") for table in tables]
            for place, item in enumerate(names):
                if not isinstance(item, str) or not item or "/" in item or not item.isprintable() or len(item) > 60:
                    raise ValueError(f"{name}.{place}.name is {repr(item)[:60]}: expected a name, of up to 60 letters")
                if item in names[:place]:
                    raise ValueError(f"{name}.{place}.name is {item!r}: expected another name than those before it")
                if not isinstance(tables[place].get("label", item), str):
                    raise ValueError(f"{name}.{place}.label is {str(tables[place]['label'])[:60]}: expected a text")
        named = {f"figures.{place}": name for place, name in enumerate(self.figures)}
        for key, name in (named if self.plot_by is None else named | {"plot_by": self.plot_by}).items():
            if name.partition(".")[0] not in ROOTS:
                raise ValueError(f"{key} is {name[:60]!r}: expected a figure, as latency.ttft_s.p99")
        if self.plot_by is not None and not self.figures:
            raise ValueError("plot_by is not expected without figures")
        for place, rate in enumerate(self.rates):
            if not MIN_RATE_PER_S <= rate <= MAX_RATE_PER_S:
                raise ValueError(
                    f"rates.{place} is {rate:g}: expected a number from {MIN_RATE_PER_S:g} to {MAX_RATE_PER_S:g}"
                )
        for place, seed in enumerate(self.seeds):
            if seed in self.seeds[:place]:
                raise ValueError(f"seeds.{place} is {seed}: expected another seed than those before it")
        if self.search is not None and self.search.compare_at not in (None, *(arm["name"] for arm in self.arms)):
            raise ValueError(f"search.compare_at is {self.search.compare_at!r}: expected the name of an arm")
        if self.search is not None and self.search.edge_seeds and self.seeds:
            raise ValueError("search.edge_seeds are not expected together with seeds")
        return self


@dataclass(frozen=True)
class Case:
    """An arm on a variant with a seed; run at the experiment's rates, or at its own."""

    variant: str
    arm: str
    x: float | None  # the variant's place on a plot's axis
    config: RunConfig
    profiles: tuple[Profile, ...]  # those of the cluster's groups
    trace: tuple[TraceRow, ...]
    reference: Profile | None = None  # the unloaded machine of the SLO
    seed: int | None = None  # None if the experiment has no seeds to compare

    def service_levels(self) -> ServiceLevels | None:
        """None if its runs have no limits on slowdowns."""
        slo = self.config.slo
        if slo is None or self.reference is None:
            return None
        alone = Reference(self.reference, self.config.cluster.max_tokens)
        return ServiceLevels(alone, slo.limits, slo.max_growth)

    def at(self, rate_per_s: float | None) -> RunConfig:
        if rate_per_s is None:
            return self.config
        arrivals = self.config.arrivals.model_copy(update={"rate_per_s": rate_per_s})
        return self.config.model_copy(update={"arrivals": arrivals})

    def with_seed(self, seed: int) -> "Case":
        return replace(self, config=self.config.model_copy(update={"seed": seed}))

    def with_duration(self, duration_s: float) -> "Case":
        return replace(self, config=self.config.model_copy(update={"duration_s": duration_s}))


@dataclass(frozen=True)
class Experiment:
    name: str
    plan: Plan
    values: Mapping[str, Any]
    cases: list[Case]

    def only(self, arms: Sequence[str]) -> "Experiment":
        """The cases of these arms. Raises: SimulationError if there is no such arm."""
        known = [arm["name"] for arm in self.plan.arms]
        for arm in arms:
            if arm not in known:
                raise SimulationError(f"--arm {arm}: expected one of {', '.join(known) or 'none'}")
        return replace(self, cases=[case for case in self.cases if case.arm in arms])


def read_experiment(file: Path, overrides: Mapping[str, Any]) -> Experiment:
    """Read a file, lay ``overrides`` over it, and check every run of it.

    Raises: SimulationError, ProfileError, WorkloadError; each one line that names the file and the key or row.
    """
    return experiment_of(file, read_values(file, overrides), overrides)


def read_values(file: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The file's values, with ``overrides`` laid over them. Raises: SimulationError."""
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SimulationError(f"cannot read {file}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise SimulationError(f"{file}: not text (UTF-8)") from None
    except (ValueError, RecursionError) as error:  # also a number too long, or lists in lists without end
        raise SimulationError(f"{file}: not TOML: {error}") from None
    return merged(values, overrides)


def experiment_of(file: Path, values: Mapping[str, Any], overrides: Mapping[str, Any]) -> Experiment:
    """The experiment with these values, read from ``file``. Raises: as ``read_experiment`` does."""
    known = sorted({*Plan.model_fields, *RunConfig.model_fields})
    for key in values:
        if key not in known:
            shown = key if key.isprintable() else repr(key)
            raise SimulationError(f"{file}: {shown} is unknown: expected {', '.join(known)}")
    plan = parse_table(Plan, {key: values[key] for key in Plan.model_fields if key in values}, str(file))
    shared = {key: value for key, value in values.items() if key not in Plan.model_fields}
    # A file may have a seed that --set replaces by seeds; any other seed beside them would have no effect.
    is_replaced = "seeds" in overrides and "seed" not in overrides
    for table in (() if is_replaced else (shared,)) + (*plan.variants, *plan.arms) if plan.seeds else ():
        if "seed" in table:
            raise SimulationError(f"{file}: seed is {str(table['seed'])[:60]}: expected none together with seeds")
    traces: dict[Path, tuple[TraceRow, ...]] = {}
    cases = []
    machines = read_machines()
    for variant in plan.variants or ({"name": ""},):
        for arm in plan.arms or ({"name": ""},):
            place = " ".join([f"{file}:", *(f"{table['name']}:" for table in (variant, arm) if table["name"])])[:-1]
            for seed in plan.seeds or (None,):
                cases.append(_case(file, place, variant, arm, shared, traces, machines, seed))
    wants_slo = plan.search is not None and any(goal.metric == SLO for goal in plan.search.goals)
    for case in cases:
        if wants_slo and case.config.slo is None:
            raise SimulationError(f"{file}: slo is missing: expected it with the goal slo")
        rates = (*plan.rates, *(plan.search.rates()[:1] if plan.search else ()))
        try:
            next(arrivals(case.at(rates[0] if rates else None), case.trace), None)
        except ActorserveError as error:
            raise SimulationError(f"{file}: {error}") from None
    return Experiment(file.stem, plan, values, cases)


def _case(
    file: Path,
    place: str,
    variant: Mapping[str, Any],
    arm: Mapping[str, Any],
    shared: Mapping[str, Any],
    traces: dict[Path, tuple[TraceRow, ...]],
    machines: Machines,
    seed: int | None,
) -> Case:
    of_variant = {key: value for key, value in variant.items() if key not in ("name", "label", "x")}
    of_arm = {key: value for key, value in arm.items() if key not in ("name", "label")}
    for key, value in shared.items():
        if not isinstance(value, Mapping) and any(isinstance(table.get(key), Mapping) for table in (variant, arm)):
            raise SimulationError(f"{file}: {key} is {str(value)[:60]}: expected a table")
    of_seed = {} if seed is None else {"seed": seed}
    whole = merged(merged(merged(shared, of_variant), of_arm), of_seed)
    if isinstance(cluster := whole.get("cluster"), Mapping):
        whole["cluster"] = machines.completed(cluster, place)
    config = parse_run(whole, place)
    x = variant.get("x")
    if x is not None and (isinstance(x, bool) or not isinstance(x, int | float) or not 0 < x <= _MAX_X):
        raise SimulationError(f"{place}: x is {str(x)[:60]}: expected a number above 0, up to {_MAX_X:g}")
    trace: tuple[TraceRow, ...] = ()
    if config.trace is not None:
        path = file.parent / config.trace
        if path not in traces:
            traces[path] = tuple(read_trace(path))
        trace = traces[path]
    profiles = _profiles(config.cluster, file.parent, place)
    reference = None
    if config.slo is not None:
        reference = load_profile(_profile_file(config.slo.reference, file.parent, f"{place}: slo.reference"))
    return Case(variant["name"], arm["name"], x, config, profiles, trace, reference, seed)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``above`` laid over ``below``: tables are merged key by key, other values are replaced."""
    result = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def _profiles(cluster: ClusterTable, folder: Path, place: str) -> tuple[Profile, ...]:
    """The profiles of the cluster's groups, which must be of one model."""
    profiles: list[Profile] = []
    for number, group in enumerate(cluster.all_groups):
        key = f"{place}: cluster.groups.{number}.profile" if cluster.groups else f"{place}: cluster.profile"
        profiles.append(load_profile(_profile_file(group.profile, folder, key)))
        first, found = profiles[0], profiles[-1]
        if (found.model, found.kv_bytes_per_token) != (first.model, first.kv_bytes_per_token):
            raise SimulationError(
                f"{key} is of {found.model} with {found.kv_bytes_per_token} bytes of KV a token: expected "
                f"{first.model} with {first.kv_bytes_per_token}, as in the first group"
            )
    return tuple(profiles)


def _profile_file(name: str, folder: Path, key: str) -> Path:
    if name.endswith(".toml"):
        file = folder / name
        if not os.path.isfile(file):  # Path.is_file raises where a name is too long
            raise SimulationError(f"{key}: there is no file {str(file)[:300]}")
        return file
    shipped = {file.stem: file for file in sorted(PROFILES.glob("*.toml"))}
    if name not in shipped:
        known = ", ".join(shipped)
        raise SimulationError(f"{key} is {name[:60]!r}: expected a .toml file, or one of {known}")
    return shipped[name]
