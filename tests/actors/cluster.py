"""A cluster of actors on the in-memory hub under a virtual clock, with cores that check their messages."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from actorserve.actors.cluster_actor import ClusterActor
from actorserve.actors.membership import COORDINATOR_NAME, Membership, WatchTimes, are_linked
from actorserve.actors.node import Node
from actorserve.actors.recorder import Recorder
from actorserve.core.effects import Effect, Meet, Send
from actorserve.core.messages import (
    PROTOCOL_VERSION,
    Hello,
    KVAccess,
    Message,
    MigrateTo,
    ModelInfo,
    Peer,
    PeerDown,
    PeerUp,
    Role,
    Speed,
    Tick,
    Unplace,
    WorkerInfo,
)
from actorserve.wire.journal import Entry
from actorserve.wire.memory_transport import Hub, MemoryTransport

TIMES = WatchTimes(heartbeat_s=0.25, death_after_s=2.0)
SPEED = Speed((1, 100), (0.01, 0.2), 0.01)
KV = KVAccess("layout", "memory://kv")
_MAX_STEPS_AT_ONCE = 10_000


def info_of(worker: str) -> WorkerInfo:
    """The WorkerInfo of the worker called ``worker``."""
    return WorkerInfo(f"kind of {worker}", ModelInfo("m", 100, 1000), SPEED, KV)


def role_of(name: str) -> Role:
    return Role(name.rpartition("/")[2].split("-")[0])


def address_of(name: str) -> str:
    return f"memory://{name}"


COORDINATORS = {COORDINATOR_NAME: address_of(COORDINATOR_NAME)}


class ScriptedCore:
    """A core that answers a type of message with the effects that a test gives for it."""

    def __init__(self, effects: dict[type[Message], list[Effect]], deadline: float | None = None) -> None:
        self.effects = effects
        self.deadline = deadline
        self.seen: list[Message] = []

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        self.seen.append(message)
        if isinstance(message, Tick):
            self.deadline = None
        return self.effects.get(type(message), [])

    def next_deadline(self) -> float | None:
        return self.deadline


@dataclass
class GreetingCore:
    """A core that greets every peer that comes up, and meets the peers that a test names. Other peers are errors."""

    up: set[Peer] = field(default_factory=set)
    greeted_by: set[Peer] = field(default_factory=set)
    log: list[tuple[float, Peer | None, Message]] = field(default_factory=list)
    tick_at: float | None = None
    downs: int = 0

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        self.log.append((now, sender, message))
        match message:
            case PeerUp(peer=peer):
                assert peer not in self.up
                assert peer.name not in {up.name for up in self.up}
                self.up.add(peer)
                return [Send(peer, Unplace("greeting", peer.incarnation))]
            case PeerDown(peer=peer):
                self.up.remove(peer)
                self.greeted_by.discard(peer)
                self.downs += 1
            case Unplace():
                assert sender in self.up
                self.greeted_by.add(sender)
            case MigrateTo(destination=peer):
                return [Meet(peer)]
            case Tick():
                self.tick_at = None
        return []

    def next_deadline(self) -> float | None:
        return self.tick_at


class EntryList:
    """A recorder that keeps the inputs."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def heard(self, entry: Entry) -> None:
        self.entries.append(entry)

    def decided(self, effects: Sequence[Effect]) -> None:
        """The tests compare cores, not effects."""


def lone_node(name: str, clock: Callable[[], float], recorder: Recorder | None = None) -> Node:
    """A node that is alone on its hub."""
    transport = MemoryTransport(Hub(), Peer(name, 1), address_of(name), clock)
    hello = Hello(PROTOCOL_VERSION, role_of(name), address_of(name))
    return Node(
        transport,
        Membership(transport, hello, COORDINATORS, TIMES),
        clock,
        recorder,
    )


@dataclass
class Process:
    actor: ClusterActor
    core: GreetingCore
    transport: MemoryTransport
    membership: Membership
    recorder: EntryList
    is_dirty: bool = True
    is_paused: bool = False

    def mark(self) -> None:
        self.is_dirty = True


class Cluster:
    """Processes by name; ``advance`` lets virtual time pass. ``coordinators``: their names, in order."""

    def __init__(self, coordinators: Sequence[str] = (COORDINATOR_NAME,)) -> None:
        self._coordinators = {name: address_of(name) for name in coordinators}
        self.now = 0.0
        self.hub = Hub()
        self.processes: dict[str, Process] = {}

    def start(self, name: str, incarnation: int, **values: Any) -> Process:
        """Start a process. ``values`` are fields of its Hello."""
        me, role = Peer(name, incarnation), role_of(name)
        transport = MemoryTransport(self.hub, me, address_of(name), lambda: self.now)
        hello = replace(Hello(PROTOCOL_VERSION, role, address_of(name)), **values)
        if role is Role.WORKER:
            hello = replace(hello, worker=info_of(name))
        membership = Membership(transport, hello, self._coordinators, TIMES)
        core = GreetingCore()
        recorder = EntryList()
        actor = ClusterActor(core, Node(transport, membership, lambda: self.now, recorder))
        process = self.processes[name] = Process(actor, core, transport, membership, recorder)
        transport.on_arrival(process.mark)
        actor.start()
        return process

    def kill(self, name: str) -> None:
        """End the process without a goodbye, as kill -9 does."""
        self.processes.pop(name).transport.close()

    def leave(self, name: str) -> None:
        """End the process in order, with a goodbye."""
        process = self.processes.pop(name)
        process.actor.stop()
        process.transport.close()

    def meet(self, one: str, other: str) -> None:
        """Have the core of ``one`` ask to meet the current incarnation of ``other``."""
        actor = self.processes[one].actor
        actor.tell(MigrateTo(self.processes[other].actor.me, 0, 0.0))
        self.processes[one].mark()

    def disturb(self, action: str, what: object) -> None:
        """Do one of the actions of random tests, as far as its processes run. A start is not one, because tests choose
        the incarnation.
        """
        match action, what:
            case "kill", str(name) if name in self.processes:
                self.kill(name)
            case "leave", str(name) if name in self.processes:
                self.leave(name)
            case "pause" | "resume", str(name) if name in self.processes:
                self.processes[name].is_paused = action == "pause"
            case "meet", (str(one), str(other)) if {one, other} <= self.processes.keys():
                self.meet(one, other)
            case "cut", (str(one), str(other)):
                self.hub.cut(address_of(one), address_of(other))
            case "heal", (str(one), str(other)):
                self.hub.heal(address_of(one), address_of(other))
            case "wait", float(seconds):
                self.advance(seconds)

    def calm_down(self, names: Sequence[str], incarnations: Iterator[int]) -> None:
        """Heal all links, have all of ``names`` run, and wait until nothing is new any more."""
        for one, other in itertools.combinations(names, 2):
            self.hub.heal(address_of(one), address_of(other))
        for name in names:
            if name not in self.processes:
                self.start(name, next(incarnations))
            self.processes[name].is_paused = False
        self.advance(20.0)

    def are_up(self, one: str, other: str) -> bool:
        """Whether both are up at the other, and have got its messages. Raises: AssertionError if they disagree."""
        sides = {
            self.processes[there].actor.me in self.processes[here].core.greeted_by
            for here, there in ((one, other), (other, one))
        }
        assert len(sides) == 1
        return sides.pop()

    def settle(self) -> None:
        """Step the actors until nothing more is due at this moment."""
        for _ in range(_MAX_STEPS_AT_ONCE):
            due = [process for process in self.processes.values() if self._is_due(process)]
            if not due:
                return
            for process in due:
                process.is_dirty = False
                process.is_dirty |= process.actor.step()
        raise AssertionError("the cluster never comes to rest")

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        self.settle()
        while True:
            deadlines = [p.actor.next_deadline() for p in self.processes.values() if not p.is_paused]
            at = min((at for at in deadlines if at is not None), default=end)
            if at > end:
                break
            self.now = max(self.now, at)
            self.settle()
            if not deadlines or at == end:
                break
        self.now = end
        self.settle()

    def problems(self, *, lossless: bool = True) -> list[str]:
        """The deviations from the steady state: linked processes are up at each other and have greeted each other.

        Two workers may also be up at each other. If not ``lossless``, a greeting may be missing, because a link was cut
        (perhaps for too short a time to cause a death).
        """
        found = []
        for one, process in sorted(self.processes.items()):
            wanted = {
                other.actor.me
                for name, other in self.processes.items()
                if name != one and are_linked(role_of(one), role_of(name))
            }
            wanted |= {
                other.actor.me
                for name, other in self.processes.items()
                if name != one and process.actor.me in other.core.up and role_of(one) is role_of(name) is Role.WORKER
            }
            if set(process.actor.peers) != wanted or process.core.up != wanted:
                found.append(f"{process.actor.me} sees {process.actor.peers}, told {process.core.up}, wanted {wanted}")
            elif lossless and process.core.greeted_by != wanted:
                found.append(f"{process.actor.me} was not greeted by {wanted - process.core.greeted_by}")
        return found

    def _is_due(self, process: Process) -> bool:
        deadline = process.actor.next_deadline()
        return not process.is_paused and (process.is_dirty or (deadline is not None and deadline <= self.now))
