"""The recipe from which a core was made, as JSON in its journal's first record. Floats keep their exact value.

The record also has the version of the messages, because the messages of another version have other fields.
"""

import json
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, TypeVar

from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.cluster.scaling import ScalingConfig
from actorserve.core.gateway.config import GatewayConfig
from actorserve.core.instance.config import InstanceConfig
from actorserve.core.kv.layer_groups import LayerGroups
from actorserve.core.messages import PROTOCOL_VERSION, InstanceRole
from actorserve.core.migration.config import MigrationConfig, MigrationMode
from actorserve.core.migration.pairing import PairingConfig
from actorserve.core.pools.config import PoolsConfig
from actorserve.core.power.curves import PhaseCurves, PowerCurve
from actorserve.core.power.governor import PowerConfig
from actorserve.core.recipes import InstanceRecipe, Recipe
from actorserve.core.scheduling.swapping import SwapMode
from actorserve.core.timing.profile import CapSweep, Curve, Link, Profile
from actorserve.errors import ProtocolError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_T = TypeVar("_T", bound="DataclassInstance")
_KINDS: dict[str, type] = {"instance": InstanceRecipe, "coordinator": ClusterConfig, "gateway": GatewayConfig}


def recipe_text(recipe: Recipe) -> str:
    """The recipe as JSON; ``parse_recipe`` reads it."""
    kind = next(name for name, cls in _KINDS.items() if isinstance(recipe, cls))
    return json.dumps({"protocol_version": PROTOCOL_VERSION, "kind": kind, **asdict(recipe)})


def parse_recipe(text: str) -> Recipe:
    """Raises: ProtocolError if the text is damaged, or of another version of the cores."""
    try:
        values = json.loads(text)
        version = values.pop("protocol_version", None)
        kind = values.pop("kind")
        if version != PROTOCOL_VERSION:
            written = "an older version" if version is None else f"version {int(version)}"
            raise ProtocolError(f"log has messages of {written}, and this program reads version {PROTOCOL_VERSION}")
        if kind in ("gateway", "coordinator"):
            values["pools"] = _whole(PoolsConfig, values["pools"])
        if kind == "gateway":
            return _whole(GatewayConfig, values)
        values["promote_after_s_of"] = _by_priority(values["promote_after_s_of"])
        if kind == "coordinator":
            return _whole(ClusterConfig, values | _policies(values))
        if kind == "instance":
            config, profile = values.pop("config"), values.pop("profile")
            return _whole(InstanceRecipe, values | {"config": _instance_config(config), "profile": _profile(profile)})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"log's recipe is of another version, or damaged: {error!r:.200}") from None
    raise ProtocolError("log's recipe is of an unknown kind")


def _whole(cls: type[_T], values: dict[str, Any]) -> _T:
    """A ``cls`` from values for all fields, because a default may have changed since the journal was written."""
    missing = {field.name for field in fields(cls)} - values.keys()
    if missing:
        raise KeyError(*sorted(missing))
    return cls(**values)


def _by_priority(values: dict[str, Any]) -> dict[int, Any]:
    return {int(priority): value for priority, value in values.items()}  # JSON's keys are strings


def _policies(values: dict[str, Any]) -> dict[str, Any]:
    """The coordinator's configs of migration, scaling and power."""
    migration, scaling, power = values["migration"], values["scaling"], values["power"]
    return {
        "power": _whole(PowerConfig, power | {"curves": _phase_curves(power["curves"])}),
        "migration": None if migration is None else _whole(PairingConfig, migration),
        "scaling": None if scaling is None else _whole(ScalingConfig, scaling),
    }


def _phase_curves(values: dict[str, Any]) -> PhaseCurves:
    phases = {
        phase: PowerCurve(tuple(values[phase]["fractions"]), tuple(values[phase]["factors"]))
        for phase in ("prompt", "token")
    }
    return _whole(PhaseCurves, values | phases)


def _instance_config(values: dict[str, Any]) -> InstanceConfig:
    headroom_bytes = _by_priority(values.pop("headroom_bytes"))
    migration = values.pop("migration")
    return _whole(
        InstanceConfig,
        values
        | {
            "headroom_bytes": headroom_bytes,
            "layer_groups": _whole(LayerGroups, values["layer_groups"]),
            "swap_mode": SwapMode(values["swap_mode"]),
            "role": InstanceRole(values["role"]),
            "migration": _whole(MigrationConfig, migration | {"mode": MigrationMode(migration["mode"])}),
        },
    )


def _profile(values: dict[str, Any]) -> Profile:
    made: dict[str, Any] = {}
    for field in fields(Profile):
        if not field.init:
            continue
        value = values[field.name]
        if field.type is Curve:
            value = Curve(tuple(value["xs"]), tuple(value["ys"]))
        elif field.type is Link:
            value = Link(**value)
        elif isinstance(value, dict):
            columns = {name: tuple(column) for name, column in value.items() if name != "source"}
            value = _whole(CapSweep, value | columns)
        elif isinstance(value, list):
            value = tuple(map(tuple, value))
        made[field.name] = value
    return Profile(**made)
