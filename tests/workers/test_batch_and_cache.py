"""A batch's tensors follow its plan."""

import pytest
import torch
from hypothesis import given, strategies as st

from actorserve.core.kv.layer_groups import NO_BLOCK
from actorserve.core.messages import StepPlan
from workers.batch import make_batch

CPU = torch.device("cpu")


@given(st.integers(1, 33), st.lists(st.tuples(st.integers(0, 90), st.integers(1, 70)), min_size=1, max_size=6))
def test_a_batch_follows_its_plan(tokens_per_block: int, rows: list[tuple[int, int]]) -> None:
    """Positions, slots, starts and fresh blocks equal those computed token by token from the plan."""
    tables, next_block = [], 0
    for start, length in rows:
        count = -(-(start + length) // tokens_per_block)
        tables.append(tuple(reversed(range(next_block, next_block + count))))
        next_block += count
    names = tuple(f"r{n}" for n in range(len(rows)))
    tokens = tuple(tuple(range(length)) for _, length in rows)
    samples = tuple(n % 2 == 0 for n in range(len(rows)))
    batch = make_batch(
        StepPlan(0, names, tuple(start for start, _ in rows), tokens, tuple(tables), samples), tokens_per_block, CPU
    )
    places = [(row, start + at) for row, (start, length) in enumerate(rows) for at in range(length)]
    slots = [
        tables[row][position // tokens_per_block] * tokens_per_block + position % tokens_per_block
        for row, position in places
    ]
    assert batch.token_ids.tolist() == [token for row in tokens for token in row]
    assert batch.positions.tolist() == [position for _, position in places]
    assert batch.slots.tolist() == slots
    assert batch.context_lens.tolist() == [start + length for start, length in rows]
    assert batch.query_starts.tolist() == [sum(length for _, length in rows[:n]) for n in range(len(rows) + 1)]
    assert batch.fresh_blocks == [slot // tokens_per_block for slot in slots if slot % tokens_per_block == 0]
    ends = [n - 1 for n in batch.query_starts.tolist()[1:]]
    assert batch.sample_rows.tolist() == [end for end, sample in zip(ends, samples, strict=True) if sample]
    assert [tuple(row[: len(table)]) for row, table in zip(batch.block_tables.tolist(), tables, strict=True)] == tables
    assert (batch.num_tokens, batch.num_requests) == (len(places), len(rows))


def test_each_layer_group_has_its_own_blocks() -> None:
    """The blocks of a row go to the layer groups in turn. One that was given up is 0."""
    table = (5, NO_BLOCK, 9, 2, 7, 4)
    batch = make_batch(StepPlan(0, ("a",), (5,), ((1, 2, 3, 4),), (table,), (True,)), 4, CPU, num_groups=2)
    first, second = batch.of_group
    assert first.block_tables.tolist() == [[5, 9, 7]]
    assert second.block_tables.tolist() == [[0, 2, 4]]
    assert first.slots.tolist() == [9 * 4 + 1, 9 * 4 + 2, 9 * 4 + 3, 7 * 4]
    assert second.slots.tolist() == [2 * 4 + 1, 2 * 4 + 2, 2 * 4 + 3, 4 * 4]
    assert second.host_block_tables.tolist() == [[0, 2, 4]]
    assert sorted(batch.fresh_blocks) == [4, 7]


def test_tokens_need_blocks_in_each_group() -> None:
    """A plan that feeds tokens to a block that was given up, or has none of some group, is refused."""
    for table in ((5, NO_BLOCK), (5,)):
        with pytest.raises(ValueError, match="blocks for"):
            make_batch(StepPlan(0, ("a",), (0,), ((1,),), (table,), (True,)), 4, CPU, num_groups=2)
