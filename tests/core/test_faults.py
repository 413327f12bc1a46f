"""The whole cluster under random faults: the invariants hold after each event, and each request gets its answer."""

from random import Random

import pytest

from actorserve.core.instance.state import InstanceState
from tests.core.faults.history import HistoryError, run_histories
from tests.core.faults.machine import STEMS
from tests.core.faults.run import run, too_rare
from tests.core.world.world import World


def test_no_fault_costs_a_token(fault_examples: int, first_fault_example: int) -> None:
    """Whatever happens, clients get the same tokens and the same end as without faults, each once, and nothing is held
    at the end; and each kind of rare event does happen.
    """
    counts = run(first_fault_example, fault_examples)
    assert too_rare(counts, fault_examples) == {}


class Sum:
    """Adds up numbers, and fails at its end if the sum is large."""

    def __init__(self) -> None:
        self.trace: list[str] = []
        self.sum = 0

    def begin(self, chance: Random) -> None:
        self.sum = 0

    def step(self, chance: Random) -> None:
        number = chance.randrange(100)
        self.sum += number >= 90
        self.trace.append(str(number))

    def end(self) -> None:
        assert self.sum < 2, "two large numbers"


def test_a_failure_is_told_by_the_shortest_history() -> None:
    """Steps that a failure does not need are left out, the others draw the same numbers, and the report names them."""
    with pytest.raises(HistoryError, match="two large numbers") as long:
        run_histories(Sum, range(100), 40, shorten=False)
    with pytest.raises(HistoryError, match="two large numbers") as short:
        run_histories(Sum, range(100), 40)
    told, numbers = (str(failure.value).partition("]:\n")[2].splitlines() for failure in (long, short))
    large = [number for number in told if int(number) >= 90]
    assert len(told) == 40
    assert len(numbers) == 2
    assert set(numbers) <= set(large)


def test_requests_share_blocks_after_a_failover() -> None:
    """Requests with a common prefix share blocks wherever they run, even after a failover."""
    world = World(num_workers=2, num_blocks=24)
    for number in range(8):
        world.open(f"r{number}", (*STEMS[0], number), 12)
        world.progress()
    world.kill("worker-0")
    world.settle()
    assert all(client.tokens == client.expected for client in world.clients.values())
    survivor = world.processes["worker-1"].core
    assert isinstance(survivor, InstanceState)
    assert survivor.memory.prefixes.num_tokens_found >= 7 * len(STEMS[0])
    world.check_at_rest()


def test_a_fenced_gateway_gets_its_only_worker_back() -> None:
    """A gateway that was considered dead goes on with its worker, which is the only one and never died."""
    world = World(num_workers=1)
    world.open("r1", (1, 2, 3), 24)
    for _ in range(6):
        world.progress()
    assert world.clients["r1"].tokens
    world.rejoin("gateway-0")
    world.settle()
    assert world.clients["r1"].tokens == world.clients["r1"].expected
    world.check_at_rest()
