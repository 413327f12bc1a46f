"""What a core was made from, as JSON in its log's first record. Numbers come back exactly."""

import json
from dataclasses import asdict, fields
from typing import Any

from actorserve.core.cluster.scaling import ScalingConfig
from actorserve.core.cluster.state import ClusterConfig
from actorserve.core.gateway.config import GatewayConfig
from actorserve.core.instance.config import InstanceConfig
from actorserve.core.migration.pairing import PairingConfig
from actorserve.core.migration.source import MigrationConfig, MigrationMode
from actorserve.core.replay import InstanceRecipe, Recipe
from actorserve.core.scheduling.swapping import SwapMode
from actorserve.core.timing.profile import Curve, Link, Profile
from actorserve.errors import ProtocolError

_KINDS: dict[str, type] = {"instance": InstanceRecipe, "coordinator": ClusterConfig, "gateway": GatewayConfig}


def recipe_text(recipe: Recipe) -> str:
    """Inverse of ``parse_recipe``."""
    kind = next(name for name, cls in _KINDS.items() if isinstance(recipe, cls))
    return json.dumps({"kind": kind, **asdict(recipe)})


def parse_recipe(text: str) -> Recipe:
    """Raises: ProtocolError for what was not written by a core like today's."""
    try:
        values = json.loads(text)
        kind = values.pop("kind")
        if kind == "gateway":
            return GatewayConfig(**values)
        values["promote_after_s_of"] = _by_priority(values["promote_after_s_of"])
        if kind == "coordinator":
            return ClusterConfig(**values | _policies(values))
        if kind == "instance":
            config, profile = values.pop("config"), values.pop("profile")
            return InstanceRecipe(config=_instance_config(config), profile=_profile(profile), **values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"log's origin is of another version, or damaged: {error!r:.200}") from None
    raise ProtocolError("log's origin is of no kind that is known")


def _by_priority(values: dict[str, Any]) -> dict[int, Any]:
    return {int(priority): value for priority, value in values.items()}  # JSON's keys are texts


def _policies(values: dict[str, Any]) -> dict[str, Any]:
    """The coordinator's, where it has them."""
    migration, scaling = values["migration"], values["scaling"]
    return {
        "migration": None if migration is None else PairingConfig(**migration),
        "scaling": None if scaling is None else ScalingConfig(**scaling),
    }


def _instance_config(values: dict[str, Any]) -> InstanceConfig:
    headroom_bytes = _by_priority(values.pop("headroom_bytes"))
    migration = values.pop("migration")
    return InstanceConfig(
        **values
        | {
            "headroom_bytes": headroom_bytes,
            "swap_mode": SwapMode(values["swap_mode"]),
            "migration": MigrationConfig(**migration | {"mode": MigrationMode(migration["mode"])}),
        }
    )


def _profile(values: dict[str, Any]) -> Profile:
    made: dict[str, Any] = {}
    for each in fields(Profile):
        if not each.init:
            continue
        value = values[each.name]
        if each.type is Curve:
            value = Curve(tuple(value["xs"]), tuple(value["ys"]))
        elif each.type is Link:
            value = Link(**value)
        elif isinstance(value, list):
            value = tuple(map(tuple, value))
        made[each.name] = value
    return Profile(**made)
