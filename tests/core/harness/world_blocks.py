"""What holds of an instance's blocks at any moment, whatever happened (design invariant 4)."""

from collections.abc import Collection

from actorserve.core.effects import Effect, Fetch, RunStep, SwapIn, SwapOut
from actorserve.core.instance.state import InstanceState
from actorserve.core.messages import StepPlan


def check_blocks(
    core: InstanceState, commands: Collection[Effect], copies: Collection[SwapOut | SwapIn], fetches: Collection[Fetch]
) -> None:
    """Free, owned and in transfer are all there is, on device and host; no step touches what is being copied."""
    is_waiting = not core.requests or core.migration_source.paused or core.migration_destination or fetches
    assert commands or copies or is_waiting, "nothing goes on any more"
    plans = [command.plan for command in commands if isinstance(command, RunStep)]
    for copy in copies:
        touched = _written(plans) if isinstance(copy, SwapOut) else _named(plans)
        assert not touched & set(copy.device_blocks), "a step touches what is being copied"
    copied = {copy.copy_id: copy for copy in copies}
    fetched = {fetch.copy_id: fetch for fetch in fetches}
    for fetch in fetched.values():
        assert fetch.into_host or not _named(plans) & set(fetch.blocks), "a step touches what is being fetched"
    host: list[int] = []
    for request in [
        *core.requests.values(),
        *core.leaving,
        *core.migration_destination.requests,
        *core.checkpoint_store.requests,
    ]:
        host += request.host_blocks
        copied.pop(request.copy_id or 0, None)
        fetched.pop(request.copy_id or 0, None)
    left_behind = copied.values()
    host += [block for copy in left_behind for block in copy.host_blocks]
    host += [block for fetch in fetched.values() if fetch.into_host for block in fetch.blocks]
    assert len(set(host)) == len(host), "a host block with two owners"
    assert core.memory.host.num_free_blocks + len(host) == core.memory.host.num_blocks, "a host block lost"
    tokens_per_block = core.config.tokens_per_block
    holds: dict[int, tuple[str, list[int]]] = {}  # of each owned block: the salt and the tokens up to its end
    for request in [*core.requests.values(), *core.leaving]:
        num_full = request.num_computed // tokens_per_block
        assert len(set(request.blocks)) == len(request.blocks), "a block twice in one request"
        for index, block in enumerate(request.blocks):
            content = (request.spec.cache_salt, request.token_ids[: (index + 1) * tokens_per_block])
            if block in holds:
                assert index < num_full, "a block with a second owner who still writes it"
                assert holds[block] == content, "a block with two owners of different content"
            elif index < num_full:
                holds[block] = content
            else:
                holds[block] = (request.request_id, [])  # equal to nobody's
    held = holds.keys() | {block for copy in left_behind for block in copy.device_blocks}
    held |= {block for fetch in fetched.values() if not fetch.into_host for block in fetch.blocks}
    for request in core.migration_destination.requests:
        for index, block in enumerate(request.blocks):
            content = (request.spec.cache_salt, request.token_ids[: (index + 1) * tokens_per_block])
            assert holds.get(block, content) == content, "a block is somebody's, and is to be somebody else's"
        held |= set(request.blocks)
    assert core.memory.device.num_free_blocks + len(held) == core.memory.device.num_usable_blocks, "a block lost"


def _written(plans: list[StepPlan]) -> set[int]:
    """The blocks that steps write."""
    return {
        table[position // 4]
        for plan in plans
        for start, tokens, table in zip(plan.starts, plan.token_ids, plan.block_tables, strict=True)
        for position in range(start, start + len(tokens))
    }


def _named(plans: list[StepPlan]) -> set[int]:
    return {block for plan in plans for table in plan.block_tables for block in table}
