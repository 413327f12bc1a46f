"""Invariants between an instance's blocks and its engine's work (design invariant 4)."""

from collections.abc import Collection

from actorserve.core.effects import Effect, Fetch, RunStep, SwapIn, SwapOut
from actorserve.core.instance.state import InstanceState
from actorserve.core.messages import StepPlan


def check_blocks(
    core: InstanceState, commands: Collection[Effect], copies: Collection[SwapOut | SwapIn], fetches: Collection[Fetch]
) -> None:
    """The engine always has work while a request waits for it, and no step touches blocks that a copy uses.

    ``InstanceState.validate`` holds that blocks are conserved, and have the owners that they should have.
    """
    held = core.migration_source.paused | core.compiling
    is_waiting = not core.requests or held or core.migration_destination or fetches
    assert commands or copies or is_waiting, "no work is in flight any more"
    plans = [command.plan for command in commands if isinstance(command, RunStep)]
    for copy in copies:
        touched = _written(plans) if isinstance(copy, SwapOut) else _named(plans)
        assert not touched & set(copy.device_blocks), "a step touches what is being copied"
    for fetch in fetches:
        assert core.memory.pools.is_fetch(fetch.copy_id), "the engine fetches what the core does not know"
        assert fetch.into_host or not _named(plans) & set(fetch.blocks), "a step touches what is being fetched"


def _written(plans: list[StepPlan]) -> set[int]:
    """The blocks that steps write."""
    return {
        table[position // 4]
        for plan in plans
        for start, tokens, table in zip(plan.starts, plan.token_ids, plan.block_tables, strict=True)
        for position in range(start, start + len(tokens))
    }


def _named(plans: list[StepPlan]) -> set[int]:
    """The blocks that steps read or write."""
    return {block for plan in plans for table in plan.block_tables for block in table}
