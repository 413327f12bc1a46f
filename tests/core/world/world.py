"""A whole cluster in one thread: the real cores of gateways, coordinator and workers, and a network that misbehaves.

Messages wait in one queue per link until the test delivers, drops or repeats them, and each survivor hears of a death
when the test says so. An engine takes its commands in the order in which they were issued, as on its thread. After each
event ``check``, the cores' own ``validate`` and the rules of ``tests.core.world.protocol`` hold the design's
invariants, and no step reads KV that is not its request's (``tests.core.world.kv_contents``).
"""

from collections import Counter
from collections.abc import Iterable

from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.cluster.state import ClusterState
from actorserve.core.effects import (
    AddToEngine,
    Deliver,
    Drained,
    DropFromEngine,
    Effect,
    End,
    Fetch,
    Meet,
    RunStep,
    Send,
    StartWorker,
    SwapIn,
    SwapOut,
)
from actorserve.core.gateway.config import GatewayConfig
from actorserve.core.gateway.state import GatewayState
from actorserve.core.instance.state import InstanceState
from actorserve.core.messages import (
    CheckpointTo,
    Close,
    Drain,
    HandOver,
    InstanceRole,
    KVAccess,
    MemoryLimit,
    Message,
    MigrateTo,
    Open,
    Peer,
    PeerDown,
    PeerUp,
    RequestSpec,
    Role,
    SamplingParams,
    SetRole,
    Start,
    StartFailed,
    Tick,
    Transfer,
    WorkerInfo,
)
from tests.core.harness.driver import PROFILE
from tests.core.world.at_rest import check_at_rest
from tests.core.world.blocks import check_blocks
from tests.core.world.engines import Engines
from tests.core.world.kv_contents import check_copied_kv, check_stored_kv
from tests.core.world.parts import (
    FIRST_COME_FIRST_SERVED,
    RETRY_S as RETRY_S,
    STOP_TOKEN,
    Client as Client,
    Process as Process,
    Scheduling as Scheduling,
    expected_answer,
    make_worker,
)
from tests.core.world.protocol import Watcher, protocol_rules

COORDINATOR = "coordinator"
CLUSTER = ClusterConfig(100, RETRY_S)
Link = tuple[Peer, Peer]
"""Sender and target."""


class World(Engines):
    """The cluster under test. Every public method is one event."""

    def __init__(
        self,
        num_workers: int = 2,
        num_gateways: int = 1,
        num_blocks: int = 12,
        max_batch_tokens: int = 8,
        scheduling: Scheduling = FIRST_COME_FIRST_SERVED,
        cluster: ClusterConfig = CLUSTER,
        watchers: Iterable[Watcher] = (),
    ) -> None:
        """``watchers`` see every event, in addition to the rules that always hold."""
        super().__init__()
        self.cluster = cluster
        self.scheduling = scheduling
        self.num_blocks = num_blocks
        self.max_batch_tokens = max_batch_tokens
        self.links: dict[Link, list[Message]] = {}
        self.repeats: list[tuple[Link, Message]] = []  # messages that arrive again, maybe much later
        self.pending_deaths: list[tuple[Peer, Peer]] = []  # (survivor, dead)
        self.owners: dict[tuple[str, int], Peer] = {}  # of each (request, epoch) ever issued
        self.num_workers = num_workers
        self._num_wanted = 0  # workers that the coordinator has asked for
        self._incarnations: Counter[str] = Counter()
        self._watchers: list[Watcher] = [*protocol_rules(), *watchers]
        self.start(COORDINATOR)
        for i in range(num_gateways):
            self.start(f"gateway-{i}")
        for i in range(num_workers):
            self.start(f"worker-{i}")

    # --- processes ---------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start a new incarnation of ``name``. Live processes hear of the old one's death, then meet the new one."""
        self.processes[name] = self.make(self._next_life(name))
        self.lives.append(self.processes[name])
        self._join(self.processes[name])

    def _next_life(self, name: str) -> Peer:
        self._incarnations[name] += 1
        return Peer(name, self._incarnations[name])

    def _join(self, process: Process) -> None:
        for survivor, dead in list(self.pending_deaths):
            if dead.name == process.peer.name:
                self.tell_death(survivor, dead)
        for other in list(self.processes.values()):
            if other is not process:
                self._meet(other, process)
                self._meet(process, other)

    def rejoin(self, name: str) -> None:
        """A live process was fenced: its core loses all peers, and meets them again as a new incarnation."""
        process = self.processes[name]
        for peer in list(process.met):
            self._lose(process, peer)
        was, process.peer = process.peer, self._next_life(name)
        self._forget_links(was)
        for client in self.clients.values():
            client.gateway = process.peer if client.gateway == was else client.gateway
        self.pending_deaths = [(survivor, dead) for survivor, dead in self.pending_deaths if survivor != was]
        self.pending_deaths += [(other.peer, was) for other in self.processes.values() if was in other.met]
        self._join(process)

    def limit_memory(self, name: str, num_blocks: int) -> None:
        """Other processes take a worker's memory or free it: ``num_blocks`` of each layer group now fit."""
        self._handle(self.processes[name], MemoryLimit(num_blocks * self.scheduling.layer_groups.num_groups))

    def drain(self, name: str) -> None:
        """An operator drains a worker, which reports when it has no requests left, and then ends."""
        self._handle(self.processes[name], Drain())

    def start_wanted(self) -> bool:
        """The first worker that does not run is started, if the coordinator has asked for one. False if not."""
        names = (f"worker-{number}" for number in range(self.num_workers))
        name = next((name for name in names if name not in self.processes), None)
        if not self._num_wanted:
            return False
        self._num_wanted -= 1
        if name is not None:
            self.start(name)
        elif COORDINATOR in self.processes:
            self._handle(self.processes[COORDINATOR], StartFailed())
        return True

    def _replace_drained(self) -> None:
        """Workers that have drained end. They start again, unless the coordinator decides how many run."""
        for name, process in list(self.processes.items()):
            if process.drained:
                self.kill(name)
                if self.cluster.scaling is None:
                    self.start(name)

    def make(self, peer: Peer) -> Process:
        """A fresh process, not yet part of the world."""
        if peer.name == COORDINATOR:
            return Process(peer, Role.COORDINATOR, ClusterState(self.cluster))
        if peer.name.startswith("gateway"):
            return Process(peer, Role.GATEWAY, GatewayState(GatewayConfig(RETRY_S, 1e9, 1e9)))
        return make_worker(peer, self.scheduling, self.num_blocks, self.max_batch_tokens)

    def meet_again(self, name: str, other: str) -> None:
        """One process wrongly considers another dead, and then meets the same incarnation, which noticed nothing."""
        self.lose(name, other)
        self.find(name, other)

    def _meet(self, process: Process, other: Process) -> None:
        """The process knows the other one from now on. Two workers meet only when one of them asks (``Meet``)."""
        if process.role is other.role:
            return
        self._tell_up(process, other)

    def _tell_up(self, process: Process, other: Process) -> None:
        worker = None
        if other.engine:
            progress = "progress" if other.follows else ""
            access = KVAccess("fake", address=str(self.lives.index(other)), progress=progress)
            worker = WorkerInfo(other.engine.kind, other.engine.model, PROFILE.speed(), kv=access)
        process.met[other.peer] = PeerUp(other.peer, other.role, worker)
        self._handle(process, process.met[other.peer])

    def _meet_worker(self, process: Process, peer: Peer) -> None:
        other = self.processes.get(peer.name)
        if other is not None and other.peer == peer and peer not in process.met and process.peer not in other.met:
            self._tell_up(process, other)
            self._tell_up(other, process)

    def part(self, name: str, other: str) -> None:
        """Two workers lose each other, and no other peer."""
        for one, two in ((name, other), (other, name)):
            process, lost = self.processes[one], self.processes[two]
            if lost.peer in process.met:
                self._lose(process, lost.peer)

    def part_one_sided(self, name: str, other: str) -> None:
        """A worker considers another worker dead, which hears no heartbeat any more, and notices that later."""
        process, lost = self.processes[name], self.processes[other]
        if lost.peer in process.met:
            self._lose(process, lost.peer)
            if process.peer in lost.met:
                self.pending_deaths.append((lost.peer, process.peer))

    def lose(self, name: str, other: str) -> None:
        """A gateway or the coordinator wrongly considers a worker dead, which notices nothing, until ``find``."""
        process, lost = self.processes[name], self.processes[other]
        if lost.peer in process.met:
            self._lose(process, lost.peer)

    def find(self, name: str, other: str) -> None:
        """The end of ``lose``: they meet again, if both still live."""
        process, lost = self.processes.get(name), self.processes.get(other)
        if process is not None and lost is not None and lost.peer not in process.met:
            self._meet(process, lost)

    def migrate(self, source: str, destination: str, num_bytes: int) -> None:
        """The coordinator tells a worker to migrate requests."""
        order = MigrateTo(self.processes[destination].peer, num_bytes, 5 * RETRY_S)
        coordinator = self.processes.get(COORDINATOR)
        if coordinator is not None:
            self._handle(self.processes[source], order, coordinator.peer)

    def set_role(self, worker: str, role: InstanceRole) -> None:
        """The coordinator tells a worker its role."""
        coordinator = self.processes.get(COORDINATOR)
        if coordinator is not None:
            self._handle(self.processes[worker], SetRole(role), coordinator.peer)

    def _lose(self, process: Process, peer: Peer) -> None:
        """The process gets no messages from that incarnation any more."""
        self.links.pop((peer, process.peer), None)
        del process.met[peer]
        self._handle(process, PeerDown(peer))

    def kill(self, name: str) -> None:
        """kill -9: its unread messages may still arrive; messages to it are lost."""
        dead = self.processes.pop(name)
        self._forget_links(dead.peer)
        self.pending_deaths += [(survivor.peer, dead.peer) for survivor in self.processes.values()]
        if dead.role is Role.GATEWAY:
            for client in self.clients.values():
                client.closed |= client.gateway == dead.peer

    def tell_death(self, survivor: Peer, dead: Peer) -> None:
        """The death watch of one survivor notices; it gets no messages from the dead incarnation any more."""
        self.pending_deaths.remove((survivor, dead))
        process = self.processes.get(survivor.name)
        if process is not None and process.peer == survivor and dead in process.met:
            self._lose(process, dead)

    def _forget_links(self, target: Peer) -> None:
        for link in [link for link in self.links if link[1] == target]:
            del self.links[link]

    # --- clients -----------------------------------------------------------------------------------------------------

    def open(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        max_tokens: int,
        gateway: str = "gateway-0",
        cache_salt: str = "",
        prompt_logprobs: int = -1,
        grammar: str = "",
        priority: int = 0,
    ) -> None:
        """A client asks for ``max_tokens`` tokens; token 7 ends the answer."""
        spec = RequestSpec(
            request_id,
            prompt,
            SamplingParams(
                seed=len(request_id),
                max_tokens=max_tokens,
                stop_token_ids=(STOP_TOKEN,),
                prompt_logprobs=prompt_logprobs,
                grammar=grammar,
            ),
            priority=priority,
            cache_salt=cache_salt,
        )
        process = self.processes[gateway]
        self.clients[request_id] = Client(spec, process.peer, *expected_answer(spec, self.num_blocks))
        self._handle(process, Open(spec))

    def close(self, request_id: str) -> None:
        """The client leaves."""
        client = self.clients[request_id]
        client.closed = True
        process = self.processes.get(client.gateway.name)
        if process is not None and process.peer == client.gateway:
            self._handle(process, Close(request_id))

    # --- network and time --------------------------------------------------------------------------------------------

    def deliver(self, link: Link, index: int = 0, *, keep: bool = False) -> None:
        """Deliver one message of a link; ``keep`` leaves a copy in the queue, to be delivered again."""
        queue = self.links[link]
        message = queue[index] if keep else queue.pop(index)
        if not queue:
            del self.links[link]
        self._arrive(link, message)

    def deliver_all(self) -> None:
        """All messages in flight arrive. The answers to them are in flight then."""
        for link in list(self.links):
            for _ in range(len(self.links.get(link, ()))):
                self.deliver(link)

    def _arrive(self, link: Link, message: Message) -> None:
        sender, target = link
        process = self.processes.get(target.name)
        if process is not None and process.peer == target and sender in process.met:
            self._handle(process, message, sender)

    def repeat_later(self, link: Link, index: int = 0) -> None:
        """A message of a link will arrive once more, at ``deliver_repeat``."""
        self.repeats.append((link, self.links[link][index]))

    def deliver_repeat(self, index: int) -> None:
        self._arrive(*self.repeats.pop(index))

    def drop(self, link: Link, index: int = 0) -> None:
        self.links[link].pop(index)
        if not self.links[link]:
            del self.links[link]

    def checkpoint(self, worker: str, holder: str) -> None:
        """The coordinator names the holder of a worker's checkpoints."""
        coordinator = self.processes.get(COORDINATOR)
        if coordinator is not None:
            self._handle(self.processes[worker], CheckpointTo(self.processes[holder].peer), coordinator.peer)

    def advance(self, seconds: float) -> None:
        """Let time pass, with every Tick that falls due."""
        self.now += seconds
        for process in list(self.processes.values()):
            deadline = process.core.next_deadline()
            if deadline is not None and deadline <= self.now:
                self._handle(process, Tick())
                deadline = process.core.next_deadline()
                assert deadline is None or deadline > self.now, "a Tick left its deadline in the past"

    def progress(
        self,
        *,
        ahead: bool = True,
        copies: bool = True,
        fetches: bool = True,
        compiles: bool = True,
        talks: int = 1,
        early: bool = False,
    ) -> None:
        """All messages in flight arrive, ``talks`` times, and all engines complete iterations, with ``copies`` a swap,
        with ``fetches`` a copy from another worker, and with ``compiles`` a grammar. With ``ahead`` the next iterations
        are planned before. With ``early``, copies from other workers follow the iterations, and end before the cores
        hear that these have ended.
        """
        for _ in range(talks):
            self.deliver_all()
        if early:
            for name in self.stepping:
                self.compute_step(name)
            for name in self.fetching:
                self.finish_fetch(name)
            self.deliver_all()
        for name in self.stepping:
            if ahead:
                self.plan_ahead(name)
            self.finish_step(name)
        for name in self.copying if copies else ():
            self.finish_copy(name)
        for name in self.compiling if compiles else ():
            self.finish_compiling(name)
        for name in self.fetching if fetches else ():
            self.finish_fetch(name)
        self._replace_drained()

    def settle(self, rounds: int = 2000) -> None:
        """Without further faults, report all deaths, deliver all messages and run all steps until no work is left."""
        self.repeats.clear()
        for _ in range(rounds):
            for survivor, dead in list(self.pending_deaths):
                self.tell_death(survivor, dead)
            self.progress()
            while self.start_wanted():
                pass
            ended = all(client.end or client.closed for client in self.clients.values())
            if ended and not self.links and not self._occupied():
                return
            self.advance(RETRY_S / 2)
        waiting = [request_id for request_id, client in self.clients.items() if not client.end and not client.closed]
        raise AssertionError(f"did not settle: {waiting} wait for their end")

    def _occupied(self) -> bool:
        return any(
            process.core.requests
            or process.core.outbox
            or process.commands
            or process.copies
            or process.fetches
            or process.compiling
            or process.core.migration_destination
            or process.core.checkpoint_store
            for process in self.processes.values()
            if isinstance(process.core, InstanceState)
        )

    # --- effects and invariants --------------------------------------------------------------------------------------

    def _handle(self, process: Process, message: Message, sender: Peer | None = None) -> None:
        reactions = [watcher.watch(process, message, sender) for watcher in self._watchers]
        effects = process.core.handle(message, self.now, sender)
        process.core.validate()
        process.log.append((self.now, sender, message, effects))
        for react in reactions:
            if react is not None:
                react(effects)
        check_stored_kv(process, message, sender, self.clients)
        # Two workers meet by events of their own, which come after all effects of this one.
        for effect in sorted(effects, key=lambda effect: isinstance(effect, Meet)):
            self._perform(process, effect)
        self.check()

    def _perform(self, process: Process, effect: Effect) -> None:
        match effect:
            case Send(to=to, message=message):
                if isinstance(message, Start):
                    owner = self.owners.setdefault((message.request.request_id, message.epoch), to)
                    assert owner == to, "one epoch with two owners"
                elif isinstance(message, HandOver) and message.transfer is not None:
                    destination = self.processes.get(message.to.name)
                    if destination is not None and destination.peer == message.to:
                        check_copied_kv(destination, Transfer(process.peer, message.transfer))
                target = self.processes.get(to.name)
                if target is not None and target.peer == to:
                    self.links.setdefault((process.peer, to), []).append(message)
            case AddToEngine() | DropFromEngine() | RunStep():
                process.command(effect)
            case Drained():
                assert not process.drained, "drained twice"
                process.drained = True
            case StartWorker():
                self._num_wanted += 1
            case SwapOut() | SwapIn():
                assert process.engine is not None
                process.copies.append(effect)
            case Fetch():
                process.fetches.append(effect)
            case Meet(peer=peer):
                self._meet_worker(process, peer)
            case Deliver(request_id=request_id, token_ids=token_ids, prompt_logprobs=prompt_logprobs):
                client = self.clients[request_id]
                assert not client.end, "tokens after the end"
                assert not client.closed, "tokens after the client left"
                client.tokens += token_ids
                if prompt_logprobs is not None:
                    client.scores.append(prompt_logprobs)
            case End(request_id=request_id):
                assert self.clients[request_id].end is None, "ended twice"
                self.clients[request_id].end = effect

    def check_at_rest(self) -> None:
        """Once everything has settled, no process holds anything for any request."""
        self.advance(10 * RETRY_S)
        for process in self.processes.values():
            check_at_rest(process)

    def check(self) -> None:
        """The invariants of design section 5 that can be seen from outside."""
        for client in self.clients.values():
            client.check()
        for process in self.processes.values():
            if isinstance(process.core, InstanceState):
                check_blocks(process.core, process.commands, process.copies, process.fetches)
