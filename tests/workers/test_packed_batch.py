"""Packed batches equal those that are made from the plan alone. Triton interprets, in a process of its own."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from actorserve.core.kv.layer_groups import NO_BLOCK
from actorserve.core.messages import NOT_YET, StepPlan
from tests.workers.triton import interpreted, needs_interpreter, run_interpreted
from workers.batch import Batch, make_batch
from workers.packed_batch import PackedBatches, PlanLimits
from workers.sampling.token_choice import Rule

CPU = torch.device("cpu")
SIZE = 4  # tokens per block
LIMITS = PlanLimits(max_requests=4, max_tokens=40, max_blocks=30)


@needs_interpreter
def test_packing_in_the_interpreter() -> None:
    """All interpreted tests of this file pass in a process whose Triton interprets."""
    run_interpreted(__file__)


class Requests:
    """Random requests, whose tables grow, shrink and change."""

    def __init__(self, seed: int, num_groups: int = 1) -> None:
        self.num_groups = num_groups
        self.random = random.Random(seed)
        self.num_computed: dict[str, int] = {}
        self.tables: dict[str, tuple[int, ...]] = {}

    def plan(self, step_id: int, max_chunk: int) -> StepPlan:
        names = self.random.sample([f"r{n}" for n in range(9)], self.random.randint(1, LIMITS.max_requests))
        starts, chunks = [], []
        for name in names:
            start = self.num_computed.get(name, 0)
            if start > 90 or self.random.random() < 0.1:  # computed again from the start, in other blocks
                start, self.tables[name] = 0, ()
            length = self.random.randint(1, max_chunk)
            missing = -(-(start + length) // SIZE) - len(self.tables.get(name, ())) // self.num_groups
            num_fresh = (max(0, missing) + self.random.randrange(2)) * self.num_groups
            fresh = (self.random.randrange(1000) for _ in range(num_fresh))
            table = [*self.tables.get(name, ()), *fresh]
            if self.num_groups > 1:  # the last group has a window, and gives up what lies before it
                end = start // SIZE * self.num_groups
                table[self.num_groups - 1 : end : self.num_groups] = [NO_BLOCK] * (start // SIZE)
            self.tables[name] = tuple(table)
            self.num_computed[name] = start + length
            starts.append(start)
            chunks.append(tuple(self.random.randrange(500) for _ in range(length)))
        samples = tuple(self.random.random() < 0.7 for _ in names)
        tables = tuple(self.tables[name] for name in names)
        return StepPlan(step_id, tuple(names), tuple(starts), tuple(chunks), tables, samples)


def check(found: Batch, plan: StepPlan, num_groups: int = 1) -> None:
    wanted = make_batch(plan, SIZE, CPU, num_groups)
    count, tokens = len(plan.request_ids), sum(map(len, plan.token_ids))
    assert found.token_ids[:tokens].tolist() == wanted.token_ids.tolist()
    assert found.positions[:tokens].tolist() == wanted.positions.tolist()
    assert found.slots[:tokens].tolist() == wanted.slots.tolist()
    assert found.query_starts[: count + 1].tolist() == wanted.query_starts.tolist()
    assert found.context_lens[:count].tolist() == wanted.context_lens.tolist()
    assert found.sample_rows.tolist() == wanted.sample_rows.tolist()
    assert len(found.of_group) == num_groups
    for group, (of_group, expected) in enumerate(zip(found.of_group, wanted.of_group, strict=True)):
        assert of_group.slots[:tokens].tolist() == expected.slots.tolist()
        assert of_group.query_starts is found.query_starts
        for row, table in zip(of_group.block_tables.tolist(), plan.block_tables, strict=False):
            assert tuple(row[: len(table) // num_groups]) == table[group::num_groups]


@interpreted
@pytest.mark.parametrize(("seed", "num_groups"), [*((seed, 1) for seed in range(6)), (6, 2), (7, 3)])
def test_interpreted_batches_follow_their_plans(seed: int, num_groups: int) -> None:
    """Whatever changed since a request's last step, or which requests were dropped, each batch equals its plan's."""
    limits = replace(LIMITS, max_blocks=LIMITS.max_blocks * num_groups, num_groups=num_groups)
    requests, batches = Requests(seed, num_groups), PackedBatches(limits, SIZE, CPU)
    for step_id in range(40):
        plan = requests.plan(step_id, max_chunk=9)
        packed = batches.make(plan)
        batches.unpack(packed)
        check(packed.batch, plan, num_groups)
        assert len(packed.sampled) == sum(plan.samples)
        if requests.random.random() < 0.3:
            batches.drop(requests.random.choice(plan.request_ids))


@interpreted
def test_interpreted_padding_is_stored_nowhere() -> None:
    """A padded batch has its plan's numbers first, then requests of one token without a slot, at fixed addresses."""
    requests, batches = Requests(1), PackedBatches(LIMITS, SIZE, CPU)
    places = set()
    for step_id in range(20):
        plan = requests.plan(step_id, max_chunk=1)
        packed = batches.make(plan, LIMITS.max_requests)
        batches.unpack(packed)
        count, batch = len(plan.request_ids), packed.batch
        check(batch, plan)
        assert batch.slots[count:].tolist() == [-1] * (LIMITS.max_requests - count)
        assert set(batch.context_lens[count:].tolist()) <= {1}
        assert set(batch.block_tables[count:, 0].tolist()) <= {0}
        assert batch.query_starts.tolist() == list(range(LIMITS.max_requests + 1))
        assert (batch.num_requests, batch.num_tokens) == (LIMITS.max_requests, LIMITS.max_requests)
        tensors = (batch.token_ids, batch.positions, batch.slots, batch.query_starts, batch.context_lens)
        places.add(tuple(tensor.data_ptr() for tensor in (*tensors, batch.block_tables, *packed._unpack_fields)))
    assert len(places) == 1


@interpreted
def test_interpreted_full_plans_lie_at_the_same_addresses() -> None:
    """A recorded graph reads fixed addresses, so the largest plan with all rules fits into the buffers, too."""
    limits = replace(LIMITS, max_tokens=LIMITS.max_requests)
    batches, names = PackedBatches(limits, SIZE, CPU), tuple("abcd")
    places = set()
    for num_blocks in (1, limits.max_blocks):
        tables = tuple(tuple(range(first, first + num_blocks)) for first in range(num_blocks, num_blocks + 4))
        starts = (num_blocks * SIZE - 1,) * 4
        plan = StepPlan(0, names, starts, ((5,),) * 4, tables, (True,) * 4)
        packed = batches.make(plan, 4, np.full((4, len(Rule._fields)), 0.5))
        batches.unpack(packed)
        check(packed.batch, plan)
        assert (packed.rules == 0.5).all()
        places.add(packed.batch.token_ids.data_ptr())
    assert len(places) == 1


@interpreted
def test_interpreted_tokens_that_are_not_yet_known_are_fed() -> None:
    """A request that feeds NOT_YET gets its own last sampled token, in any order of requests."""
    batches = PackedBatches(LIMITS, SIZE, CPU)
    first = StepPlan(0, ("a", "b", "c"), (0, 0, 0), ((7, 8), (9,), (5,)), ((1,), (2,), (3,)), (True, False, True))
    packed = batches.make(first)
    batches.unpack(packed)
    batches.keep_tokens(packed, torch.tensor([100, 300]))
    second = StepPlan(
        1, ("c", "d", "a"), (1, 0, 1), ((NOT_YET,), (4,), (8, NOT_YET)), ((3,), (4,), (1,)), (True, True, True)
    )
    packed = batches.make(second)
    batches.unpack(packed)
    assert packed.batch.token_ids.tolist() == [300, 4, 8, 100]
    with pytest.raises(ValueError, match="3 requests sampled"):
        batches.keep_tokens(packed, torch.tensor([1, 2]))


@interpreted
def test_interpreted_large_plans_get_buffers_of_their_own() -> None:
    """A plan of more tokens than the limit gives a batch, too, and the next one is right."""
    batches = PackedBatches(replace(LIMITS, max_blocks=200), SIZE, CPU)
    for number in (700, 3):
        plan = StepPlan(0, ("a",), (0,), (tuple(range(number)),), (tuple(range(-(-number // SIZE))),), (True,))
        packed = batches.make(plan)
        batches.unpack(packed)
        check(packed.batch, plan)


@interpreted
def test_interpreted_plans_beyond_the_limits_are_refused() -> None:
    """Too many requests or blocks, missing blocks, and padding of chunks are errors in one line."""
    batches = PackedBatches(LIMITS, SIZE, CPU)
    plan = StepPlan(0, ("a",), (0,), ((1, 2),), ((1,),), (True,))
    with pytest.raises(ValueError, match="cannot be padded to 2 of one token"):
        batches.make(plan, 2)
    with pytest.raises(ValueError, match="too few blocks"):
        batches.make(replace(plan, starts=(3,)))
    with pytest.raises(ValueError, match="more than 30 blocks"):
        batches.make(replace(plan, block_tables=(tuple(range(31)),)))
    many = tuple("abcde")
    with pytest.raises(ValueError, match="more than 4 requests"):
        batches.make(StepPlan(0, many, (0,) * 5, ((1,),) * 5, ((1,),) * 5, (True,) * 5))
