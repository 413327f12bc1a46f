"""Machine types: what one costs and draws, and how much KV of a model its memory holds (``config/machines.toml``)."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from actorserve.errors import SimulationError
from actorserve.profile_files import load_profile
from actorserve.sim.tables import Table, parse_table

ROOT: Final = Path(__file__).resolve().parents[2]
PROFILES: Final = ROOT / "config" / "profiles"
MACHINES: Final = ROOT / "config" / "machines.toml"


class MachineTable(Table):
    profile: str = Field(min_length=1, description="the end of its profiles' names, after the model and a dash")
    memory_bytes: int = Field(ge=1, description="bytes of memory for weights and KV")
    cost_per_hour: float = Field(ge=0, description="cost per hour, in any currency")
    watts: float = Field(ge=0, description="power that is provisioned, in watts")
    prefill_factor: float = Field(1.0, ge=1, description="factor on the times of prompts in the profile")
    decode_factor: float = Field(1.0, ge=1, description="factor on the times of decodes in the profile")


class ModelTable(Table):
    weights_bytes: int = Field(ge=1, description="bytes of its weights")


class MachinesTable(Table):
    """Machine types and models by name."""

    machines: dict[str, MachineTable]
    models: dict[str, ModelTable]


@dataclass(frozen=True, slots=True)
class Machines:
    """Completes the groups of a cluster's table that name a machine."""

    known: MachinesTable

    def completed(self, cluster: Mapping[str, Any], place: str) -> dict[str, Any]:
        """The cluster's table, with the profile, memory, cost and power of each group that names its ``machine``. Keys
        that a group has itself stay. ``model`` names the model of all such groups, and is taken out with ``machine``.

        Raises: SimulationError, ProfileError.
        """
        result = {key: value for key, value in cluster.items() if key != "model"}
        groups = cluster.get("groups")
        if not isinstance(groups, list):
            return dict(cluster)
        if not any(map(_names_machine, groups)):
            return dict(cluster)
        model = cluster.get("model")
        if model is None:
            raise SimulationError(f"{place}: cluster.model is missing: expected {_names(self.known.models)}")
        if model not in self.known.models:
            told = f"{place}: cluster.model is {str(model)[:60]!r}"
            raise SimulationError(f"{told}: expected {_names(self.known.models)}")
        result["groups"] = [
            self._completed(group, model, f"{place}: cluster.groups.{number}.machine")
            if _names_machine(group)
            else group
            for number, group in enumerate(groups)
        ]
        return result

    def _completed(self, group: Mapping[str, Any], model: str, key: str) -> dict[str, Any]:
        name = group["machine"]
        machine = self.known.machines.get(name) if isinstance(name, str) else None
        if machine is None:
            raise SimulationError(f"{key} is {str(name)[:60]!r}: expected {_names(self.known.machines)}")
        profile = f"{model}-{machine.profile}"
        kv_bytes = machine.memory_bytes - self.known.models[model].weights_bytes
        kv_tokens = kv_bytes // load_profile(PROFILES / f"{profile}.toml").kv_bytes_per_token
        if kv_tokens < 1:
            raise SimulationError(f"{key} is {name!r}: expected a machine whose memory holds more than {model}")
        of_machine: dict[str, Any] = {
            "profile": profile,
            "kv_tokens": kv_tokens,
            "cost_per_hour": machine.cost_per_hour,
            "watts": machine.watts,
        }
        for name in ("prefill_factor", "decode_factor"):
            if (factor := getattr(machine, name)) != 1.0:
                of_machine[name] = factor
        return of_machine | {key: value for key, value in group.items() if key != "machine"}


def read_machines(file: Path = MACHINES) -> Machines:
    """Raises: SimulationError."""
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SimulationError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:  # not TOML, or not text
        raise SimulationError(f"{file}: not TOML: {error}") from None
    return Machines(parse_table(MachinesTable, values, str(file)))


def _names_machine(group: Any) -> bool:
    return isinstance(group, Mapping) and "machine" in group


def _names(known: Mapping[str, Table]) -> str:
    return f"one of {', '.join(known)}"
