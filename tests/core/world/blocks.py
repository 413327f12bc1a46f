"""Invariants between an instance's blocks and its engine's work (design invariant 4)."""

from collections.abc import Collection

from actorserve.core.effects import Effect, Fetch, RunStep, SwapIn, SwapOut
from actorserve.core.instance.state import InstanceState
from actorserve.core.kv.layer_groups import NO_BLOCK, LayerGroups
from actorserve.core.messages import StepPlan
from tests.core.world.parts import TOKENS_PER_BLOCK


def check_blocks(
    core: InstanceState, commands: Collection[Effect], copies: Collection[SwapOut | SwapIn], fetches: Collection[Fetch]
) -> None:
    """The engine always has work while a request waits for it, and no step touches blocks that a copy uses.

    ``InstanceState.validate`` holds that blocks are conserved, and have the owners that they should have.
    """
    groups = core.config.layer_groups
    held = core.migration_source.paused | core.compiling
    is_waiting = not core.requests or held or core.migration_destination or fetches
    assert commands or copies or is_waiting, "no work is in flight any more"
    plans = [command.plan for command in commands if isinstance(command, RunStep)]
    for copy in copies:
        touched = _written(plans, groups) if isinstance(copy, SwapOut) else _used(plans, groups)
        assert not touched & set(copy.device_blocks), "a step touches what is being copied"
    for fetch in fetches:
        assert core.memory.pools.is_fetch(fetch.copy_id), "the engine fetches what the core does not know"
        is_used = not fetch.into_host and _used(plans, groups) & set(fetch.blocks)
        assert not is_used, "a step touches what is being fetched"


def _written(plans: list[StepPlan], groups: LayerGroups) -> set[int]:
    """The blocks that steps write."""
    return {
        table[position // TOKENS_PER_BLOCK * groups.num_groups + group]
        for plan in plans
        for start, tokens, table in zip(plan.starts, plan.token_ids, plan.block_tables, strict=True)
        for position in range(start, start + len(tokens))
        for group in range(groups.num_groups)
    }


def _used(plans: list[StepPlan], groups: LayerGroups) -> set[int]:
    """The blocks that steps read or write: of layers with a window only those that it reaches."""
    return {
        block
        for plan in plans
        for start, table in zip(plan.starts, plan.block_tables, strict=True)
        for index, block in enumerate(table)
        if index % groups.num_groups < groups.num_full
        or index // groups.num_groups >= (start - groups.window + 1) // TOKENS_PER_BLOCK
    } - {NO_BLOCK}
