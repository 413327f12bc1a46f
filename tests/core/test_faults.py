"""The whole cluster under random misfortune: the invariants hold after every event, and everything ends well."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actorserve.core.instance import InstanceState
from actorserve.core.messages import FinishReason, Peer
from tests.core.world import COORDINATOR, World

NAMES = (COORDINATOR, "worker-0", "worker-1", "gateway-0", "gateway-1")
PROMPTS = st.lists(st.integers(0, 49), min_size=1, max_size=20).map(tuple)


class ClusterMachine(RuleBasedStateMachine):
    """Clients come and go, messages are late, lost and repeated, and processes die, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(num_workers=2, num_gateways=2)
        self.num_opened = 0

    def _link(self, data: st.DataObject) -> tuple[Peer, Peer]:
        return data.draw(st.sampled_from(sorted(self.world.links)))

    @precondition(lambda self: any(name.startswith("gateway") for name in self.world.processes))
    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=4), max_tokens=st.integers(1, 24), data=st.data())
    def open(self, prompts: list[tuple[int, ...]], max_tokens: int, data: st.DataObject) -> None:
        gateways = sorted(name for name in self.world.processes if name.startswith("gateway"))
        for prompt in prompts:
            self.num_opened += 1
            self.world.open(f"r{self.num_opened}", prompt, max_tokens, data.draw(st.sampled_from(gateways)))

    @rule(rounds=st.integers(1, 6))
    def progress(self, rounds: int) -> None:
        """Things go well for a while, so that misfortune meets requests in every stage."""
        for _ in range(rounds):
            self.world.progress()

    @rule(rounds=st.integers(1, 3))
    def progress_and_tick(self, rounds: int) -> None:
        for _ in range(rounds):
            self.world.progress()
            self.world.advance(0.5)

    @precondition(lambda self: self.world.clients)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.world.close(data.draw(st.sampled_from(sorted(self.world.clients))))

    @precondition(lambda self: self.world.links)
    @rule(data=st.data(), count=st.integers(1, 8))
    def deliver(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            if self.world.links:
                self.world.deliver(self._link(data))

    @precondition(lambda self: self.world.links)
    @rule(data=st.data())
    def deliver_out_of_order(self, data: st.DataObject) -> None:
        link = self._link(data)
        self.world.deliver(link, data.draw(st.integers(0, len(self.world.links[link]) - 1)))

    @precondition(lambda self: self.world.links)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        self.world.deliver(self._link(data), keep=True)

    @precondition(lambda self: self.world.links)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.world.drop(self._link(data))

    @precondition(lambda self: self.world.stepping)
    @rule(data=st.data(), count=st.integers(1, 8))
    def finish_steps(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            if self.world.stepping:
                self.world.finish_step(data.draw(st.sampled_from(sorted(self.world.stepping))))

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 3.0]))
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(name=st.sampled_from(NAMES))
    def kill(self, name: str) -> None:
        if name in self.world.processes:
            self.world.kill(name)

    @precondition(lambda self: len(self.world.processes) < len(NAMES))
    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        self.world.start(data.draw(st.sampled_from([name for name in NAMES if name not in self.world.processes])))

    @precondition(lambda self: self.world.pending_deaths)
    @rule(data=st.data())
    def tell_death(self, data: st.DataObject) -> None:
        self.world.tell_death(*data.draw(st.sampled_from(sorted(self.world.pending_deaths))))

    @precondition(lambda self: "worker-0" in self.world.processes and "worker-1" in self.world.processes)
    @rule(data=st.data())
    def suspect_wrongly(self, data: st.DataObject) -> None:
        """A gateway takes a living worker for dead, and meets it again: its old epoch must be fenced."""
        gateways = sorted(name for name in self.world.processes if name.startswith("gateway"))
        if gateways:
            gateway = self.world.processes[data.draw(st.sampled_from(gateways))]
            worker = self.world.processes[data.draw(st.sampled_from(["worker-0", "worker-1"]))]
            if (gateway.peer, worker.peer) not in self.world.pending_deaths:
                self.world.pending_deaths.append((gateway.peer, worker.peer))
                self.world.tell_death(gateway.peer, worker.peer)
                self.world._meet(gateway, worker)

    @invariant()
    def invariants_hold(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        world = self.world
        for name in NAMES:
            if name not in world.processes:
                world.start(name)
        world.settle()
        for client in world.clients.values():
            if not client.closed:
                assert client.end is not None
                assert client.end.reason in (FinishReason.STOP, FinishReason.LENGTH), client.end
                assert client.tokens == world.expected(client)
        for process in world.processes.values():
            if isinstance(process.core, InstanceState):
                assert process.core.allocator.num_free_blocks == process.core.config.num_blocks


TestCluster = ClusterMachine.TestCase
TestCluster.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
