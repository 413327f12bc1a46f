"""Engine and instance follow the settings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actorserve.core.messages import Attained, RequestSpec, SamplingParams, Start
from actorserve.core.migration.config import LayerCopies
from actorserve.core.replay import make_instance_core
from actorserve.core.scheduling.swapping import SwapMode
from actorserve.core_configs import instance_recipe
from actorserve.processes.child import Child
from actorserve.processes.status import Reporter
from actorserve.settings import load_settings
from tests.core.harness.driver import GATEWAY, PROFILE
from workers.engine import Engine
from workers.engines.fake_engine import FakeEngine
from workers.engines.make_engine import load_engine
from workers.worker import sizes_of


def loaded(model: Any, **workers: Any) -> Engine:
    settings = load_settings(
        None,
        {
            "model": {"path": str(model.folder)},
            "workers": {"device": "cpu", "tokens_per_block": 8, "kv_cache_bytes": 100_000, **workers},
        },
    )
    return load_engine(Child("worker-0", settings, Path(), Reporter(None)))


@pytest.mark.parametrize("engine", ["torch", "fake"])
def test_pools_have_the_sizes_that_settings_say(make_model: Any, engine: str) -> None:
    """Pools hold as many whole blocks as their bytes allow; the host pool is empty without bytes or with recompute."""
    model = make_model()
    found = loaded(model, engine=engine, host_kv_bytes=50_000)
    assert found.tokens_per_block == 8
    assert found.num_blocks == 100_000 // found.bytes_per_block
    assert found.num_host_blocks == 50_000 // found.bytes_per_block
    assert loaded(model, engine=engine).num_host_blocks == 0
    assert loaded(model, engine=engine, host_kv_bytes=0).num_host_blocks == 0
    assert loaded(model, engine=engine, host_kv_bytes=50_000, swap="recompute").num_host_blocks == 0


def test_engines_of_one_model_have_one_digest(make_model: Any) -> None:
    """The digest of the weights is the same whatever computes them, and another for another model."""
    model = make_model()
    digests = {loaded(model, engine=engine).weights_digest for engine in ("torch", "fake")}
    assert len(digests) == 1
    assert loaded(make_model(num_hidden_layers=1), engine="fake").weights_digest not in digests


def test_the_instance_schedules_as_settings_say() -> None:
    """Swap mode, pools, policy and the time to a promotion (by priority) reach the core."""
    settings = load_settings(
        None,
        {
            "workers": {
                "policy": "naive_mlfq",
                "swap": "reactive",
                "promote_after_s": 7.0,
                "promote_after_by_priority_s": {"1": 3.0},
            }
        },
    )
    engine = FakeEngine(num_host_blocks=5)
    core = make_instance_core(instance_recipe(settings, sizes_of(engine, settings), PROFILE))
    assert (core.config.num_blocks, core.config.num_host_blocks) == (engine.num_blocks, 5)
    assert core.config.swap_mode is SwapMode.REACTIVE
    assert core.times.profile is PROFILE
    for name, priority, promotion_s in (("late", 0, 7.0), ("early", 1, 3.0)):
        # On the third level, and waiting since just now.
        spec = RequestSpec(name, (1, 2), SamplingParams(seed=0, max_tokens=9), priority=priority)
        core.handle(Start(1, spec, Attained(1.0, quantum_s=0.04, quantum_used_s=0.01)), 100.0, GATEWAY)
        request = core.requests[name]
        core.policy.order(100.0 + promotion_s - 0.1)
        assert core.policy.attained(request, 100.0).quantum_s == pytest.approx(0.04)
        core.policy.order(100.0 + promotion_s + 0.1)
        assert core.policy.attained(request, 100.0).quantum_s < 0.04


def test_the_policy_is_the_one_that_settings_say() -> None:
    """With first come, first served, a later request comes after an earlier one."""
    settings = load_settings(None, {"workers": {"policy": "fcfs"}})
    core = make_instance_core(instance_recipe(settings, sizes_of(FakeEngine(), settings), PROFILE))
    for name, num_prompt in (("long", 90), ("short", 2)):
        spec = RequestSpec(name, (1,) * num_prompt, SamplingParams(seed=0, max_tokens=9))
        core.handle(Start(1, spec), 100.0, GATEWAY)
    assert [request.request_id for request in core.policy.order(200.0)] == ["long", "short"]


@pytest.mark.parametrize(("shows_progress", "expected"), [(True, LayerCopies.PROFITABLE), (False, LayerCopies.AFTER)])
def test_only_kv_whose_progress_shows_is_copied_early(shows_progress: bool, expected: LayerCopies) -> None:
    """An engine that cannot show its iterations offers a prompt's KV when the iteration has ended, because any earlier
    copy of it would be refused.
    """
    settings, engine = load_settings(None, {}), FakeEngine()
    if not shows_progress:
        engine.kv = replace(engine.kv, progress=None)
    recipe = instance_recipe(settings, sizes_of(engine, settings), PROFILE)
    assert recipe.config.migration.layer_copies is expected
