"""The KV that a worker uses is that of the request's own tokens, in every block.

The fake engine's next token depends on the newest entry alone, so a wrong older block would change no answer.
"""

from collections.abc import Mapping, Sequence

from actorserve.core.effects import RunStep
from actorserve.core.instance.state import InstanceState
from actorserve.core.kv.layer_groups import NO_BLOCK
from actorserve.core.messages import CheckpointConfirmed, Message, Peer, Transfer
from tests.core.world.parts import TOKENS_PER_BLOCK, Client, Process
from workers.engines.fake_engine import FakeEngine, expected_entries


def check_read_kv(process: Process, clients: Mapping[str, Client]) -> None:
    """Raises: AssertionError if the step that is about to run reads KV of other tokens than its requests'."""
    step, engine = process.commands[0], process.engine
    assert isinstance(step, RunStep)
    assert engine is not None
    groups, plan = engine.layer_groups, step.plan
    for request_id, start, table in zip(plan.request_ids, plan.starts, plan.block_tables, strict=True):
        entries = clients[request_id].kv_entries[:start]
        for group in range(groups.num_groups):
            first = 0 if group < groups.num_full else max(0, start - groups.window + 1)
            blocks = table[group :: groups.num_groups]
            assert _holds(engine, blocks, group, first, entries), f"{request_id} reads KV that is not its own"


def check_stored_kv(process: Process, message: Message, sender: Peer | None, clients: Mapping[str, Client]) -> None:
    """After each event. Raises: AssertionError if a worker has just confirmed checkpoints with other tokens' KV."""
    core, engine = process.core, process.engine
    if not isinstance(message, CheckpointConfirmed) or not isinstance(core, InstanceState) or sender is None:
        return
    stored = core.checkpoint_store._stored.get(Transfer(sender, message.transfer))
    if stored is None:
        return
    assert engine is not None
    kv, groups = stored.kv, engine.layer_groups
    num_tokens = stored.num_confirmed * TOKENS_PER_BLOCK
    first_seen = core.memory.rows.first_seen(max(0, stored.num_confirmed - 1))
    assert kv.first_row <= first_seen, "the holder has given up a row that the next tokens see"
    entries = expected_entries(kv.token_ids[:num_tokens])
    for group in range(groups.num_groups):
        blocks = kv.host_blocks[group :: groups.num_groups]
        first = 0 if group < groups.num_full else kv.first_row * TOKENS_PER_BLOCK
        assert _holds(engine, blocks, group, first, entries, on_host=True), "a confirmed checkpoint has other KV"


def check_copied_kv(destination: Process, transfer: Transfer) -> None:
    """When a source asks for a hand-over. Raises: AssertionError if the destination copied other tokens' KV for it."""
    core, engine = destination.core, destination.engine
    assert isinstance(core, InstanceState)
    assert engine is not None
    incoming = core.migration_destination._incoming.get(transfer)
    if incoming is None:
        return
    kv, groups = incoming.kv, engine.layer_groups
    entries = expected_entries(kv.token_ids)[: kv.num_computed]
    for group in range(groups.num_groups):
        first = 0 if group < groups.num_full else max(0, kv.num_computed - groups.window + 1)
        blocks = kv.blocks[group :: groups.num_groups]
        assert _holds(engine, blocks, group, first, entries), "a hand-over names KV that is not the request's own"


def _holds(
    engine: FakeEngine, blocks: Sequence[int], group: int, first: int, entries: Sequence[int], *, on_host: bool = False
) -> bool:
    """Whether a layer group's blocks hold these entries, except those before the position ``first``."""
    for row in range(first // TOKENS_PER_BLOCK, -(-len(entries) // TOKENS_PER_BLOCK)):
        if on_host and blocks[row] == NO_BLOCK:
            continue  # long prompts give up these blocks before they are read
        begin = row * TOKENS_PER_BLOCK
        seen = max(0, first - begin)
        expected = list(entries[begin + seen : begin + TOKENS_PER_BLOCK])
        if engine.entries(blocks[row], group, on_host=on_host)[seen : seen + len(expected)] != expected:
            return False
    return True
