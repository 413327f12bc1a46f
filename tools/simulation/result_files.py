"""Result files of experiments: written whole or not at all, and read strictly."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from actorserve.errors import SimulationError
from actorserve.sim.tables import Table, parse_table
from tools.simulation.experiment import Experiment
from tools.simulation.runner import CaseResult

JSON_NAME = "metrics.json"


class _Requests(Table):
    model_config = ConfigDict(extra="ignore")
    arrived: int = Field(ge=0)
    completed: int = Field(ge=0)


class _Summary(Table):
    """Of a latency, in seconds."""

    model_config = ConfigDict(extra="ignore")
    p50: float = Field(ge=0)
    p90: float = Field(ge=0)
    p99: float = Field(ge=0)


class _Latency(Table):
    model_config = ConfigDict(extra="ignore")
    ttft_s: _Summary | None
    tpot_s: _Summary | None
    tbt_s: _Summary | None
    e2e_s: _Summary | None
    per_token_s: _Summary | None


class _Throughput(Table):
    model_config = ConfigDict(extra="ignore")
    output_tokens_per_s: float = Field(ge=0)


class _Run(Table):
    """The figures that comparisons need; there are more."""

    model_config = ConfigDict(extra="ignore")
    rate_per_s: float | None = Field(gt=0)
    requests: _Requests
    latency: _Latency
    throughput: _Throughput


class _Case(Table):
    variant: str
    arm: str
    seed: int
    x: float | None
    runs: tuple[_Run, ...] = Field(strict=False)
    held: dict[str, float | None]


class _ResultFile(Table):
    name: str
    config: dict[str, Any]
    cases: tuple[_Case, ...] = Field(strict=False, min_length=1)


def as_values(experiment: Experiment, results: Sequence[CaseResult]) -> dict[str, Any]:
    """Everything as JSON values. They depend on the configuration alone, not on the clock or the machine."""
    goals = experiment.plan.search.goals if experiment.plan.search is not None else ()
    values: dict[str, Any] = {"name": experiment.name, "config": experiment.values, "cases": []}
    for case, result in zip(experiment.cases, results, strict=True):
        values["cases"].append(
            {
                "variant": case.variant,
                "arm": case.arm,
                "seed": case.config.seed,
                "x": case.x,
                "runs": [{"rate_per_s": rate, **figures} for rate, figures in result.runs.items()],
                "held": {goal.name: rate for goal, rate in zip(goals, result.held, strict=False)},
            }
        )
    return values


def as_json(values: dict[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, indent=1, allow_nan=True) + "\n"


def write_results(values: dict[str, Any], folder: Path) -> Path:
    """Raises: SimulationError, for example if the disk is full. Then an older file stays as it was."""
    file = folder / JSON_NAME
    unfinished = folder / f"{JSON_NAME}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_text(as_json(values), encoding="utf-8")
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise SimulationError(f"cannot write {file}: {error.strerror}") from None
    return file


def read_results(place: Path) -> dict[str, Any]:
    """The values of a result file, or of the one in this folder.

    Raises: SimulationError, in one line that names the file, the key and what was expected.
    """
    file = place / JSON_NAME if place.is_dir() else place
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SimulationError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SimulationError(f"{file}: not text (UTF-8)") from None
    except json.JSONDecodeError as error:
        raise SimulationError(f"{file}: not JSON: line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number too long, or lists in lists without end
        raise SimulationError(f"{file}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise SimulationError(f"{file}: it holds a {type(values).__name__}: expected the tables of a result file")
    parse_table(_ResultFile, values, str(file))
    return values
