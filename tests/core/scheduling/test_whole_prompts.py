"""Prompts that are never cut."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from actorserve.core.instance.state import InstanceState
from actorserve.core.messages import InstanceRole
from actorserve.core.scheduling.policy import FirstComeFirstServed
from actorserve.core.scheduling.whole_prompts import WholePrompts
from actorserve.core.timing.step_times import StepTimes
from tests.core.harness.driver import CONFIG, PROFILE, Instance, spec


def fed(instance: Instance) -> dict[str, int]:
    """How many tokens each request feeds into the iteration in flight."""
    plan = instance.plan
    assert plan is not None
    return {name: len(tokens) for name, tokens in zip(plan.request_ids, plan.token_ids, strict=True)}


def make(max_batch_tokens: int, **changes: Any) -> Instance:
    config = replace(
        CONFIG,
        num_blocks=512,
        tokens_per_block=4,
        max_context_tokens=400,
        max_batch_requests=8,
        max_batch_tokens=max_batch_tokens,
        tpot_target_s=1e-6,
        whole_prompts=True,
        run_ahead=False,
        prefix_cache=False,
        **changes,
    )
    instance = Instance(config)
    instance.state = InstanceState(config, FirstComeFirstServed(), StepTimes(PROFILE))
    return instance


def test_prompts_share_an_iteration_up_to_the_limit() -> None:
    """Whole prompts enter in order, and a short prompt does not overtake a long one that waits for room."""
    instance = make(max_batch_tokens=40)
    instance.start(spec("first", 5))
    for name, length in (("a", 20), ("b", 15), ("long", 30), ("short", 1)):
        instance.start(spec(name, length))
    assert fed(instance) == {"first": 5}
    instance.done()
    assert fed(instance) == {"first": 1, "a": 20, "b": 15}  # four tokens are left
    instance.done()
    assert fed(instance) == {"first": 1, "a": 1, "b": 1, "long": 30, "short": 1}


def test_a_prompt_over_the_limit_runs_whole() -> None:
    """It has its iteration for itself, without other prompts and without decodes."""
    instance = make(max_batch_tokens=40)
    instance.start(spec("first", 5))
    for name, length in (("huge", 300), ("after", 3)):
        instance.start(spec(name, length))
    instance.done()
    assert fed(instance) == {"huge": 300}
    instance.done()
    assert fed(instance) == {"first": 1, "huge": 1, "after": 3}


def test_decodes_get_the_tokens_that_prompts_leave() -> None:
    """The most urgent decodes share the prompts' iteration, and the others wait for the next one."""
    instance = make(max_batch_tokens=40)
    for name in ("a", "b", "c"):
        instance.start(spec(name, 5))
    instance.done()
    assert fed(instance) == {"a": 1, "b": 5, "c": 5}
    instance.start(spec("long", 38))
    instance.done()
    assert fed(instance) == {"a": 1, "b": 1, "long": 38}
    instance.done()
    assert fed(instance) == {"a": 1, "b": 1, "c": 1, "long": 1}


@pytest.mark.parametrize(("max_wait_s", "turns"), [(0.5, [5, 11]), (math.inf, [])])
def test_a_decode_that_prompts_keep_out_ages(max_wait_s: float, turns: list[int]) -> None:
    """Prompts fill every iteration of 0.1 s. A decode that has been left out for half a second goes before them, and
    then waits for as long again; without ageing it waits as long as prompts come.
    """
    instance = make(max_batch_tokens=40, max_decode_wait_s=max_wait_s)
    instance.start(spec("decodes", 5, max_tokens=100))
    for number in range(14):
        instance.start(spec(f"prompt{number}", 40, max_tokens=1))
    got = []
    for number in range(14):
        instance.done(now=0.1 * number)
        if "decodes" in fed(instance):
            got.append(number)
    assert [number for number in got if number < 13] == turns


def test_an_overdue_decode_leaves_the_rest_to_prompts() -> None:
    """It takes one token of the iteration, and a prompt that no longer fits waits for the next one."""
    instance = make(max_batch_tokens=40, max_decode_wait_s=0.0)
    instance.start(spec("decodes", 5, max_tokens=100))
    for name, length in (("a", 40), ("b", 20), ("c", 20)):
        instance.start(spec(name, length, max_tokens=1))
    instance.done()
    assert fed(instance) == {"a": 40}
    instance.done()
    assert fed(instance) == {"decodes": 1, "b": 20}
    instance.done()
    assert fed(instance) == {"decodes": 1, "c": 20}


def test_a_prompt_instance_batches_prompts_up_to_its_own_limit() -> None:
    """A third prompt would exceed ``max_prompt_tokens``, and what decodes there waits for the prompts."""
    instance = make(max_batch_tokens=400, max_prompt_tokens=40, role=InstanceRole.PROMPT)
    instance.start(spec("first", 5))
    for name, length in (("a", 20), ("b", 20), ("c", 20)):
        instance.start(spec(name, length))
    instance.done()
    assert fed(instance) == {"a": 20, "b": 20}


@given(st.integers(1, 100), st.integers(0, 100), st.lists(st.integers(1, 200), min_size=1, max_size=10))
def test_no_prompt_is_cut(max_batch_tokens: int, num_decodes: int, lengths: list[int]) -> None:
    """Each prompt gets all of its tokens or none. The first one always gets them, and others only within the limit.
    Decodes stay within it, too, unless there is no prompt.
    """
    budget = WholePrompts(max_batch_tokens, StepTimes(PROFILE)).begin(num_decodes, 10 * num_decodes)
    taken = [budget.take(length, 0) for length in lengths]
    assert taken[0] == lengths[0]
    assert all(number in (0, length) for number, length in zip(taken, lengths, strict=True))
    assert sum(taken) == budget.iteration.num_tokens
    assert sum(taken[1:]) == 0 or sum(taken) <= max_batch_tokens
    assert budget.max_decodes == max(0, max_batch_tokens - sum(taken))
    assert WholePrompts(max_batch_tokens, StepTimes(PROFILE)).begin(num_decodes, 10).max_decodes is None
