"""The operator's options reach every field of the cores' configs, from settings and from a simulation's table."""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from actorserve.actors.membership import WatchTimes
from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.cluster.scaling import ScalingConfig
from actorserve.core.gateway.config import GatewayConfig
from actorserve.core.instance.config import InstanceConfig
from actorserve.core.messages import InstanceRole
from actorserve.core.migration.config import LayerCopies, MigrationConfig, MigrationMode
from actorserve.core.migration.pairing import PairingConfig
from actorserve.core.placement.rules import DISPATCH_RULES
from actorserve.core.pools.config import PoolsConfig
from actorserve.core.power.curves import CURVES, measured_curves
from actorserve.core.power.governor import PowerConfig
from actorserve.core.recipes import InstanceRecipe
from actorserve.core.scheduling.policies import POLICIES
from actorserve.core.scheduling.swapping import SwapMode
from actorserve.core.timing.profile import CapSweep
from actorserve.core_configs import (
    Chosen,
    EngineSizes,
    cluster_config,
    gateway_config,
    instance_recipe,
    power_config,
)
from actorserve.errors import ProfileError
from actorserve.options import (
    ClusterOptions,
    MigrationOptions,
    PoolsOptions,
    RoleName,
    ScalingOptions,
    SchedulingOptions,
    default_of,
)
from actorserve.profile_files import load_power_curves, load_profile, save_profile
from actorserve.settings import PowerSettings, Settings, load_settings
from actorserve.sim.cluster_table import ClusterTable, LinksTable, MigrationTable, PoolsTable, ScalingTable
from actorserve.sim.power.machine_power import PowerTable
from actorserve.wire.recipes import parse_recipe, recipe_text
from tests.sim.profiles import PROFILE
from workers.engine_options import EngineOptions

SIZES = EngineSizes(num_blocks=100, tokens_per_block=4, bytes_per_block=400, max_context_tokens=200, num_host_blocks=7)
REQUIRED = {"profile": "sums", "kv_tokens": 400, "max_context_tokens": 200}
SCALED = {"max_workers": 9}
CORES: tuple[type[Any], ...] = (
    ClusterConfig,
    PairingConfig,
    PoolsConfig,
    ScalingConfig,
    GatewayConfig,
    InstanceConfig,
    MigrationConfig,
    InstanceRecipe,
)

PROFILES = Path(__file__).resolve().parent.parent / "config" / "profiles"


@dataclass(frozen=True)
class Told:
    """``{section: {option: value}}`` sets ``field`` of ``config`` to ``expected``."""

    config: type[Any]
    field: str
    section: str
    option: str
    value: Any
    expected: Any


def told(config: type[Any], section: str, field: str, value: Any, expected: Any = None, option: str = "") -> Told:
    return Told(config, field, section, option or field, value, value if expected is None else expected)


TOLD = [
    told(ClusterConfig, "cluster", "max_waiting_requests", 17),
    told(ClusterConfig, "cluster", "retry_s", 3.5),
    told(ClusterConfig, "workers", "max_queue_per_instance", 5),
    told(ClusterConfig, "workers", "promote_after_s", 2.5),
    told(ClusterConfig, "workers", "promote_after_s_of", {"1": 7.0}, {1: 7.0}, "promote_after_by_priority_s"),
    told(ClusterConfig, "workers", "min_share", 0.25),
    told(ClusterConfig, "cluster", "report_ttl_s", 3.0, 15.0, "load_report_s"),
    told(ClusterConfig, "cluster", "digest_s", 3.0, 15.0, "load_report_s"),
    told(ClusterConfig, "cluster", "report_ttl_s", 8.0, 4.0, "death_after_s"),
    told(ClusterConfig, "cluster", "dispatch", "round_robin"),
    told(ClusterConfig, "cluster", "late_binding", False),
    told(ClusterConfig, "workers", "prefix_aware", True, True, "prefix_cache"),
    told(ClusterConfig, "workers", "prefix_aware", False, False, "prefix_cache"),
    told(ClusterConfig, "cluster", "round_s", 0.75),
    told(ClusterConfig, "migration", "migration", False, option="enabled"),
    told(ClusterConfig, "scaling", "scaling", 9, option="max_workers"),
    told(ClusterConfig, "migration", "checkpoints", 32, True, "checkpoint_tokens"),
    told(PairingConfig, "migration", "source_below", 3.0),
    told(PairingConfig, "migration", "source_until", 99.0),
    told(PairingConfig, "migration", "destination_above", 222.0),
    told(PairingConfig, "cluster", "ttl_s", 0.75, 3.0, "round_s"),
    told(PairingConfig, "migration", "rest_s", 3.5),
    told(PairingConfig, "migration", "max_moves", 3),
    told(PoolsConfig, "pools", "max_pending_tokens", 77),
    told(PoolsConfig, "pools", "hold_s", 9.0),
    told(PoolsConfig, "pools", "across_kinds", True),
    told(PoolsConfig, "pools", "follow_load", True),
    told(PoolsConfig, "workers", "tpot_target_s", 0.123),
    told(ScalingConfig, "scaling", "max_workers", 11),
    told(ScalingConfig, "scaling", "min_workers", 2),
    told(ScalingConfig, "scaling", "scale_out_below", 3.0),
    told(ScalingConfig, "scaling", "scale_in_above", 999.0),
    told(ScalingConfig, "scaling", "hold_s", 0.5),
    told(ScalingConfig, "scaling", "start_timeout_s", 60.0),
    told(ScalingConfig, "workers", "num_initial", 3, option="count"),
    told(GatewayConfig, "cluster", "retry_s", 3.5),
    told(GatewayConfig, "cluster", "no_instance_timeout_s", 9.0),
    told(GatewayConfig, "cluster", "resume_timeout_s", 9.0),
    told(GatewayConfig, "workers", "max_queue_per_instance", 5),
    told(GatewayConfig, "workers", "prefix_aware", True, True, "prefix_cache"),
    told(GatewayConfig, "workers", "prefix_aware", False, False, "prefix_cache"),
    told(GatewayConfig, "cluster", "report_ttl_s", 3.0, 15.0, "load_report_s"),
    told(InstanceConfig, "workers", "max_batch_requests", 7),
    told(InstanceConfig, "workers", "max_batch_tokens", 128),
    told(InstanceConfig, "pools", "max_prompt_tokens", 96),
    told(InstanceConfig, "cluster", "load_report_s", 0.5),
    told(InstanceConfig, "cluster", "retry_s", 3.5),
    told(InstanceConfig, "workers", "tpot_target_s", inf),
    told(InstanceConfig, "workers", "run_ahead", False),
    told(InstanceConfig, "workers", "headroom_bytes", {"-1": 8}, {-1: 800}, "headroom_tokens_by_priority"),
    told(InstanceConfig, "workers", "prefix_cache", True),
    told(InstanceConfig, "workers", "prefix_cache", False, False),
    told(InstanceConfig, "workers", "swap_mode", "reactive", SwapMode.REACTIVE, "swap"),
    told(InstanceConfig, "migration", "checkpoint_tokens", 32),
    told(MigrationConfig, "migration", "mode", "blocking", MigrationMode.BLOCKING),
    told(MigrationConfig, "migration", "layer_copies", "always", LayerCopies.ALWAYS),
    told(MigrationConfig, "migration", "max_outgoing", 2),
    told(MigrationConfig, "migration", "timeout_s", 7.0),
    told(MigrationConfig, "migration", "bytes_per_s", 2.0**21),
    told(InstanceRecipe, "workers", "policy", "srpt"),
    told(InstanceRecipe, "workers", "promote_after_s", 2.5),
    told(InstanceRecipe, "workers", "promote_after_s_of", {"1": 7.0}, {1: 7.0}, "promote_after_by_priority_s"),
    told(InstanceRecipe, "workers", "min_share", 0.25),
]

OTHERWISE = {
    InstanceConfig: {
        "num_blocks": "the engine",
        "tokens_per_block": "the engine",
        "bytes_per_block": "the engine",
        "layer_groups": "the engine",
        "max_context_tokens": "the engine",
        "num_host_blocks": "the engine",
        "whole_prompts": "an option of simulated clusters alone, for baselines",
        "max_decode_wait_s": "simulated clusters alone, by promote_after_s, for baselines",
        "report_changes": "an option of simulated clusters alone, for baselines",
        "migration": "MigrationConfig, which is walked itself",
        "role": "the worker's place in the settings' list of roles",
    },
    ClusterConfig: {
        "power": "settings of the coordinator's process alone (power_config)",
        "pools": "PoolsConfig, which is walked itself",
    },
    GatewayConfig: {"pools": "PoolsConfig, which is walked itself"},
    MigrationConfig: {"ticket_key": "a secret of the process", "num_layers": "the engine"},
    InstanceRecipe: {"config": "InstanceConfig, which is walked itself", "profile": "measured, or read from a file"},
}
"""Fields that no option sets -> what sets them."""

WITHOUT_DEFAULT = {
    (ClusterConfig, "report_ttl_s"),  # inf in the core; derived from load_report_s
    (GatewayConfig, "report_ttl_s"),  # inf in the core; derived from load_report_s
    (ClusterConfig, "migration"),  # None in the core, and so is scaling
    (ClusterConfig, "scaling"),
    (PoolsConfig, "tpot_target_s"),  # inf in the core, because without pools that follow the load nothing asks for it
    (ScalingConfig, "max_workers"),  # it is set only if the operator wants scaling
    (ScalingConfig, "num_initial"),
    (InstanceRecipe, "policy"),
}
"""Fields that options set, with other defaults than the core's."""


def from_settings(changes: dict[str, dict[str, Any]]) -> Settings:
    return load_settings(None, changes)


def from_simulation(changes: dict[str, dict[str, Any]]) -> ClusterTable:
    """The same for a simulation's file, in which ``workers`` and ``cluster`` are one table."""
    flat = changes.get("workers", {}) | changes.get("cluster", {})
    if "count" in flat:
        flat["instances"] = flat.pop("count")
    nested = {name: changes[name] for name in ("migration", "pools", "scaling") if name in changes}
    return ClusterTable.model_validate(REQUIRED | flat | nested)


SHELLS: dict[str, Callable[[dict[str, dict[str, Any]]], Chosen]] = {
    "settings": from_settings,
    "simulation": from_simulation,
}


def configs(chosen: Chosen) -> dict[type[Any], Any]:
    """All configs that ``actorserve.core_configs`` makes."""
    recipe = instance_recipe(chosen, SIZES, PROFILE, b"key")
    cluster = cluster_config(chosen)
    return {
        ClusterConfig: cluster,
        PairingConfig: cluster.migration,
        ScalingConfig: cluster.scaling,
        PoolsConfig: cluster.pools,
        GatewayConfig: gateway_config(chosen),
        InstanceConfig: recipe.config,
        MigrationConfig: recipe.config.migration,
        InstanceRecipe: recipe,
    }


def fields_of_all() -> Iterator[tuple[type[Any], Field[Any]]]:
    for config in CORES:
        for field in fields(config):
            yield config, field


def test_settings_of_power_reach_the_governor() -> None:
    """The section's values, the target time of tokens and the hosts' budgets are in the governor's config."""
    settings = Settings.model_validate(
        {"power": {"budget_watts": 4200, "curves": "a100", "hold_s": 7}, "workers": {"tpot_target_s": 0.05}}
    )
    made = power_config(
        settings.power, load_power_curves(settings.power.curves), settings.workers.tpot_target_s, {"alpha": 1400.0}
    )
    assert made == PowerConfig(4200.0, {"alpha": 1400.0}, CURVES["a100"], 0.05, 7.0)
    assert power_config(Settings().power, CURVES["h100"], 0.1, {}) == PowerConfig()


def test_measured_power_curves_reach_the_governor(tmp_path: Path) -> None:
    """The setting names a profile in which the cost of caps was measured; any other file is refused by its name."""
    file = tmp_path / "gpu.toml"
    shipped = load_profile(PROFILES / "bloom-176b-h100.toml")
    caps = CapSweep(
        (200.0, 300.0, 400.0), (2.0, 1.1, 1.0), (1.5, 1.0, 1.01), (200.0, 300.0, 390.0), (150.0,) * 3, "here"
    )
    save_profile(replace(shipped, caps=caps), file)
    curves = load_power_curves(str(file))
    assert curves == measured_curves(caps)
    config = ClusterConfig(power=power_config(PowerSettings(), curves, 0.1, {}))
    assert config.power.curves == curves
    assert parse_recipe(recipe_text(config)) == config
    recipe = instance_recipe(Settings(), SIZES, replace(shipped, caps=caps))
    assert parse_recipe(recipe_text(recipe)) == recipe
    save_profile(shipped, file)
    with pytest.raises(ProfileError, match=r"gpu\.toml: power\.curves needs a table \[caps\]"):
        load_power_curves(str(file))
    with pytest.raises(ProfileError, match="cannot read a profile from h10"):
        load_power_curves("h10")
    save_profile(
        replace(shipped, caps=CapSweep((300.0, 400.0), (0.0, 1.0), (1.0,) * 2, (390.0,) * 2, (150.0,) * 2, "here")),
        file,
    )
    with pytest.raises(ProfileError, match=r"gpu\.toml: caps: .* needs .* times above 0"):
        load_power_curves(str(file))


def test_every_field_of_every_config_is_walked() -> None:
    """Every field of a core's config is set by an option, or is listed here with what sets it."""
    known = {(case.config, case.field) for case in TOLD}
    known |= {(config, name) for config, names in OTHERWISE.items() for name in names}
    assert known == {(config, field.name) for config, field in fields_of_all()}


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("each", TOLD, ids=lambda each: f"{each.config.__name__}.{each.field}-{each.option}")
def test_an_option_reaches_its_core(each: Told, shell: str) -> None:
    """A value in a settings file or in a simulation's file reaches the core's config."""
    changes: dict[str, dict[str, Any]] = {"migration": {"enabled": True}, "scaling": dict(SCALED)}
    changes[each.section] = changes.get(each.section, {}) | {each.option: each.value}
    made = configs(SHELLS[shell](changes))
    if each.option == "enabled":
        assert made[PairingConfig] is None
    elif (each.config, each.field) == (ClusterConfig, "scaling"):
        assert made[ScalingConfig].max_workers == each.value
    else:
        assert getattr(made[each.config], each.field) == each.expected


@pytest.mark.parametrize("shell", SHELLS)
def test_the_cores_own_the_defaults(shell: str) -> None:
    """An option that is not set has the default of the core's config, in a server and in a simulation."""
    changes: dict[str, dict[str, Any]] = {"migration": {"enabled": True}, "scaling": dict(SCALED)}
    if shell == "simulation":
        changes["workers"] = {"prefix_cache": True}
    made = configs(SHELLS[shell](changes))
    checked = {(case.config, case.field) for case in TOLD} - WITHOUT_DEFAULT
    for config, field in fields_of_all():
        if (config, field.name) in checked:
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            assert getattr(made[config], field.name) == default, f"{config.__name__}.{field.name}"


def test_both_shells_have_the_same_defaults() -> None:
    """A simulated cluster has a server's defaults, except that requests do not migrate and prefixes are not cached."""
    settings, table = Settings(), ClusterTable.model_validate(REQUIRED)
    sections: dict[type[Any], tuple[Any, Any]] = {
        SchedulingOptions: (settings.workers, table),
        ClusterOptions: (settings.cluster, table),
        MigrationOptions: (settings.migration, table.migration),
        PoolsOptions: (settings.pools, table.pools),
        ScalingOptions: (settings.scaling, table.scaling),
    }
    different = {
        name
        for options, (ours, simulated) in sections.items()
        for name in options.model_fields
        if getattr(ours, name) != getattr(simulated, name)
    }
    assert different == {"enabled", "prefix_cache"}


@pytest.mark.parametrize("config", [WatchTimes, EngineOptions])
def test_no_other_config_has_defaults_of_its_own(config: type[Any]) -> None:
    """A field that an option of the same name sets has that option's default, or none. An engine resolves no device."""
    settings = Settings()
    options = {name: value for _, section in settings for name, value in section}
    options["max_batch_requests"], options["max_batch_tokens"] = settings.workers.batch_limits()  # on a CPU
    shared = [field for field in fields(config) if field.name in options and field.name != "device"]
    assert shared
    for field in shared:
        assert field.default is MISSING or field.default == options[field.name], f"{config.__name__}.{field.name}"


def test_names_of_choices_are_those_of_the_core() -> None:
    """An option for a policy, a rule or a mode offers exactly the core's values."""

    def offered(options: type[Any], name: str) -> set[str]:
        return set(get_args(options.model_fields[name].annotation))

    assert offered(SchedulingOptions, "policy") == set(POLICIES)
    assert offered(type(Settings().workers), "policy") == set(POLICIES) - {"fcfs_reserving", "paper_skip_join_mlfq"}
    assert offered(SchedulingOptions, "swap") == set(SwapMode)
    assert offered(ClusterOptions, "dispatch") == set(DISPATCH_RULES)
    assert offered(MigrationOptions, "mode") == set(MigrationMode)
    assert offered(MigrationOptions, "layer_copies") == set(LayerCopies)
    assert set(get_args(RoleName)) == set(InstanceRole)


def test_every_option_has_a_description() -> None:
    """Every option of a server's settings and of a simulated cluster has a description."""
    sections: list[type[BaseModel]] = [type(each) for _, each in Settings()]
    sections += [ClusterTable, LinksTable, MigrationTable, PoolsTable, PowerTable, ScalingTable]
    for section in sections:
        for name, field in section.model_fields.items():
            if name not in ("migration", "pools", "scaling", "costs", "links", "power"):
                assert field.description, f"{section.__name__}.{name}"


def test_a_default_that_is_none_is_an_error() -> None:
    """Asking for the default of a field without one raises TypeError."""
    with pytest.raises(TypeError, match=r"ScalingConfig\.max_workers has no default"):
        default_of(ScalingConfig, "max_workers")


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("load_report_s", "death_after_s", "expected_s"),
    [(0.2, 2.0, 1.0), (0.2, 20.0, 10.0), (0.5, 2.0, 2.5)],
)
def test_a_short_silence_is_no_illness(
    load_report_s: float, death_after_s: float, expected_s: float, shell: str
) -> None:
    """A worker counts as unwell after five missed reports, but not before half of death_after_s."""
    chosen = SHELLS[shell]({"cluster": {"load_report_s": load_report_s, "death_after_s": death_after_s}})
    assert cluster_config(chosen).report_ttl_s == pytest.approx(expected_s)


@pytest.mark.parametrize("shell", SHELLS)
def test_scaling_begins_with_the_workers_of_the_start(shell: str) -> None:
    """The first workers count as starting when the coordinator begins. A fixed number of workers has no scaling."""
    changes: dict[str, dict[str, Any]] = {"workers": {"count": 3}}
    assert cluster_config(SHELLS[shell](changes)).scaling is None
    changes["scaling"] = {"max_workers": 4, "start_timeout_s": 7.0}
    scaling = cluster_config(SHELLS[shell](changes)).scaling
    assert scaling is not None
    assert (scaling.num_initial, scaling.max_workers, scaling.start_timeout_s) == (3, 4, 7.0)


@pytest.mark.parametrize(("is_cpu", "expected"), [(True, 32 * 2**20), (False, None)])
def test_workers_on_cpus_read_at_a_limited_rate(is_cpu: bool, expected: int | None) -> None:
    """Without bytes_per_s in the settings, workers on CPUs read KV at 32 MiB/s, and workers on GPUs without a limit."""
    sizes = EngineSizes(100, 4, 400, 200, is_cpu=is_cpu)
    assert instance_recipe(Settings(), sizes, PROFILE).config.migration.bytes_per_s == expected
    paced = load_settings(None, {"migration": {"bytes_per_s": 2**21}})
    assert instance_recipe(paced, sizes, PROFILE).config.migration.bytes_per_s == 2**21


def test_the_copy_rate_of_real_workers_is_not_tiny() -> None:
    """A rate below 1 MiB/s is refused, because a migration might never end."""
    with pytest.raises(ValueError, match="bytes_per_s is 1000: expected at least 1048576"):
        Settings.model_validate({"migration": {"bytes_per_s": 1000}})
