"""The whole cluster under random faults: the invariants hold after each event, and each request gets its answer."""

from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from actorserve.core.instance.state import InstanceState
from actorserve.core.kv.layer_groups import ONE_GROUP, LayerGroups
from actorserve.core.messages import Peer
from actorserve.core.migration.config import MigrationMode
from actorserve.core.scheduling.policies import make_policy
from actorserve.core.scheduling.swapping import SwapMode
from tests.core.world.parts import GRAMMARS
from tests.core.world.world import COORDINATOR, Scheduling, World

GATEWAYS = ("gateway-0", "gateway-1")
WORKERS = ("worker-0", "worker-1")
NAMES = (COORDINATOR, *WORKERS, *GATEWAYS)
STEMS = tuple((first, *range(11, 26)) for first in (1, 2))
"""What prompts begin with, so that requests share blocks; after its first block one stem goes on as the other."""
LONG_STEMS = tuple((first, *range(11, 70)) for first in (1, 2))
"""For layers with windows: a request has many more rows than a window at a time."""


def _prompts(stems: tuple[tuple[int, ...], ...], max_count: int) -> st.SearchStrategy[list[tuple[int, ...]]]:
    prompt = st.builds(
        lambda stem, num_shared, rest: (*stem[:num_shared], *rest),
        st.sampled_from(stems),
        st.integers(0, len(stems[0])),
        st.lists(st.integers(0, 49), min_size=1, max_size=8),
    )
    return st.lists(prompt, min_size=1, max_size=max_count)


SCHEDULINGS = [
    Scheduling(
        lambda times, name=name: make_policy(name, times),  # type: ignore[misc]
        mode,
        num_host_blocks,
        migration,
        checkpoint_tokens,
        layer_groups,
    )
    for layer_groups in (ONE_GROUP, LayerGroups(1, 2, window=6))
    for name, mode, num_host_blocks, migration, checkpoint_tokens in (
        ("fcfs", SwapMode.PROACTIVE, 0, MigrationMode.LIVE, 0),
        ("skip_join_mlfq", SwapMode.PROACTIVE, 40, MigrationMode.LIVE, 4),
        ("skip_join_mlfq", SwapMode.PROACTIVE, 3, MigrationMode.LIVE, 0),
        ("skip_join_mlfq", SwapMode.REACTIVE, 20, MigrationMode.LIVE, 8),
        ("skip_join_mlfq", SwapMode.RECOMPUTE, 0, MigrationMode.BLOCKING, 0),
        ("fcfs", SwapMode.REACTIVE, 12, MigrationMode.LIVE, 4),
        ("srpt", SwapMode.PROACTIVE, 8, MigrationMode.RECOMPUTE, 0),
    )
]


class ClusterMachine(RuleBasedStateMachine):
    """Clients come and leave, messages are late, lost and repeated, and processes die, in any order.

    There are few rules, and each chooses among several faults, so that most events find requests in flight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_opened = 0

    def _link(self, data: st.DataObject) -> tuple[Peer, Peer]:
        return data.draw(st.sampled_from(sorted(self.world.links)))

    @initialize(
        data=st.data(),
        rounds=st.integers(2, 8),
        is_small=st.booleans(),
        scheduling=st.sampled_from(SCHEDULINGS),
    )
    def begin_busy(self, data: st.DataObject, rounds: int, is_small: bool, scheduling: Scheduling) -> None:
        """Memory is too small for all requests, so that some are preempted, or large enough for the other worker's."""
        has_windows = scheduling.layer_groups.num_windowed > 0
        self.stems = LONG_STEMS if has_windows else STEMS
        num_blocks, max_batch_tokens = ((30 if has_windows else 12) if is_small else 48), 4 if has_windows else 8
        self.world = World(
            num_workers=2,
            num_gateways=2,
            num_blocks=num_blocks,
            max_batch_tokens=max_batch_tokens,
            scheduling=scheduling,
        )
        self.world.checkpoint(*WORKERS)
        self.world.checkpoint(*reversed(WORKERS))
        self.open(num_blocks + 12, data, max_count=8)
        self.progress(rounds)

    @rule(max_tokens=st.integers(1, 60), data=st.data())
    def open(self, max_tokens: int, data: st.DataObject, max_count: int = 4) -> None:
        gateways = [name for name in GATEWAYS if name in self.world.processes]
        for prompt in data.draw(_prompts(self.stems, max_count)) if gateways else ():
            self.num_opened += 1
            gateway, salt = data.draw(st.sampled_from(gateways)), data.draw(st.sampled_from(["", "", "tenant"]))
            prompt_logprobs = data.draw(st.sampled_from([-1, -1, 0, 2]))
            grammar = data.draw(st.sampled_from(["", "", "", "", *GRAMMARS]))
            self.world.open(f"r{self.num_opened}", prompt, max_tokens, gateway, salt, prompt_logprobs, grammar)

    @rule(
        rounds=st.integers(1, 6),
        ahead=st.booleans(),
        fetches=st.sampled_from([True, True, False]),
        compiles=st.sampled_from([True, True, False]),
    )
    def progress(self, rounds: int, ahead: bool = True, fetches: bool = True, compiles: bool = True) -> None:
        """Run without faults for a while, so that faults meet requests in each stage; copies between workers, and the
        compiling of grammars, may take longer.
        """
        for _ in range(rounds):
            self.world.progress(ahead=ahead, fetches=fetches, compiles=compiles)

    @rule(rounds=st.integers(1, 3), seconds=st.sampled_from([0.1, 0.5, 1.0, 3.0]))
    def progress_and_tick(self, rounds: int, seconds: float) -> None:
        for _ in range(rounds):
            self.world.progress()
            self.world.advance(seconds)

    @precondition(lambda self: self.world.clients)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.world.close(data.draw(st.sampled_from(sorted(self.world.clients))))

    @rule(data=st.data(), how=st.sampled_from(["deliver", "reorder", "repeat", "drop"]), count=st.integers(1, 8))
    def disturb(self, data: st.DataObject, how: str, count: int) -> None:
        """Messages arrive singly, early, twice, or never."""
        for _ in range(count):
            if not self.world.links:
                return
            link = self._link(data)
            match how:
                case "deliver":
                    self.world.deliver(link)
                case "reorder":
                    self.world.deliver(link, data.draw(st.integers(0, len(self.world.links[link]) - 1)))
                case "repeat":
                    self.world.deliver(link, keep=True)
                case _:
                    self.world.drop(link)

    @precondition(lambda self: self.world.stepping or self.world.copying or self.world.fetching or self.world.compiling)
    @rule(data=st.data(), count=st.integers(1, 8))
    def finish_steps_or_copies(self, data: st.DataObject, count: int) -> None:
        world = self.world
        for _ in range(count):
            busy = [(name, how) for name in world.stepping for how in ("step", "plan ahead")]
            busy += [(name, "copy") for name in world.copying]
            busy += [(name, how) for name in world.fetching for how in ("fetch", "fetch", "fail")]
            busy += [(name, "grammar") for name in world.compiling]
            if not busy:
                return
            name, what = data.draw(st.sampled_from(sorted(busy)))
            match what:
                case "step":
                    world.finish_step(name)
                case "plan ahead":
                    world.plan_ahead(name)
                case "copy":
                    world.finish_copy(name)
                case "grammar":
                    num_compiling = len(world.processes[name].compiling)
                    world.finish_compiling(name, data.draw(st.integers(0, num_compiling - 1)))
                case _:
                    world.finish_fetch(name, failed=what == "fail")

    @rule(workers=st.permutations(WORKERS), num_bytes=st.sampled_from([200, 10_000]), data=st.data())
    def migrate(self, workers: list[str], num_bytes: int, data: st.DataObject) -> None:
        """Order a migration, and let it progress for a while."""
        if all(name in self.world.processes for name in workers):
            self.world.migrate(workers[0], workers[1], num_bytes)
            self.progress(data.draw(st.integers(0, 6)), fetches=data.draw(st.sampled_from([True, True, False])))

    @rule(workers=st.permutations(WORKERS), how=st.sampled_from(["part", "part", "no more", "guard", "guard"]))
    def disturb_migration(self, workers: list[str], how: str) -> None:
        """During migrations, the two workers lose each other, an order ends, or one worker becomes the holder of the
        other's checkpoints.
        """
        if all(name in self.world.processes for name in workers):
            if how == "part":
                self.world.part(workers[0], workers[1])
            elif how == "guard":
                self.world.checkpoint(workers[0], workers[1])
            else:
                self.world.migrate(workers[0], workers[1], 0)

    @rule(name=st.sampled_from(NAMES))
    def kill_or_restart(self, name: str) -> None:
        if name in self.world.processes:
            self.world.kill(name)
        else:
            self.world.start(name)

    @precondition(lambda self: self.world.pending_deaths)
    @rule(data=st.data())
    def tell_death(self, data: st.DataObject) -> None:
        self.world.tell_death(*data.draw(st.sampled_from(sorted(self.world.pending_deaths))))

    @rule(
        worker=st.sampled_from(WORKERS), data=st.data(), how=st.sampled_from(["drain", "suspect", "rejoin", "memory"])
    )
    def unsettle(self, worker: str, data: st.DataObject, how: str) -> None:
        """A worker is drained or loses memory, or a live process is considered dead and then fenced."""
        if how == "rejoin":
            name = data.draw(st.sampled_from(NAMES))
            if name in self.world.processes:
                self.world.rejoin(name)
        elif worker in self.world.processes:
            if how == "drain":
                self.world.drain(worker)
            elif how == "memory":
                self.world.limit_memory(worker, data.draw(st.integers(0, self.world.num_blocks)))
            else:
                name = data.draw(st.sampled_from((COORDINATOR, *GATEWAYS)))
                if name in self.world.processes:
                    self.world.meet_again(name, worker)

    @invariant()
    def invariants_hold(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        world = self.world
        for name in NAMES:
            if name not in world.processes:
                world.start(name)
        for name in WORKERS:
            world.limit_memory(name, world.num_blocks)
        world.settle()
        for client in world.clients.values():
            if not client.closed:
                assert client.end is not None
                assert client.end.refusal is None, client.end
                client.check()
        world.check_at_rest()


def test_no_fault_costs_a_token(fault_examples: int) -> None:
    """Whatever happens, clients get the same tokens and the same end as without faults, each once, and nothing is held
    at the end.
    """
    chosen = settings(max_examples=fault_examples, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(ClusterMachine, settings=chosen)


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
