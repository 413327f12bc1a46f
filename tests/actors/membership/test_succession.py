"""The succession of coordinators under a virtual clock: who serves, while messages are lost, late or repeated, and
processes die.
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import given, settings, strategies as st

from actorserve.actors.membership.leadership import Change, CoordinatorSide, FollowerSide, Leadership
from actorserve.actors.membership.succession import (
    LIMIT,
    MAX_COORDINATORS,
    Candidate,
    Follower,
    Order,
    next_term,
)
from actorserve.core.messages import Following, Message, Peer, PeerDown, PeerUp, Role, Serve, Serving, StandBy

TAKEOVER_S = 0.5
DEATH_S = 2.0
HEARTBEAT_S = 0.5
BOUND_S = 3.0  # enough for silence, for every place in the order, and for two coordinators that begin at once
A, B, C = "a/coordinator", "b/coordinator", "c/coordinator"
G, W, W1 = "a/gateway-0", "b/worker-0", "b/worker-1"
COORDINATORS = (A, B, C)
NAMES = (*COORDINATORS, G, W, W1)


@dataclass
class _Process:
    """One process, with its links. ``up``: the peers that its core sees, and ``term``: the one it serves in."""

    me: Peer
    side: Leadership
    links: set[Peer] = field(default_factory=set)
    up: set[Peer] = field(default_factory=set)
    term: int = 0
    newest: tuple[int, Peer | None] = (0, None)
    paused_until: float = 0.0
    heartbeat_at: float = 0.0
    inbox: list[tuple[Peer, Message]] = field(default_factory=list)

    def apply(self, changes: list[Change]) -> None:
        for change in changes:
            match change:
                case PeerUp(peer=peer, term=term):
                    assert peer not in self.up
                    self.up.add(peer)
                    if peer.name in COORDINATORS:
                        self._obeys(term, peer)
                case PeerDown(peer=peer):
                    self.up.remove(peer)
                case Serve(term=term):
                    assert not self.up
                    assert term > self.term
                    self.term = term
                case StandBy():
                    assert not self.up
                    self.term = 0

    def _obeys(self, term: int, coordinator: Peer) -> None:
        assert len([peer for peer in self.up if peer.name in COORDINATORS]) == 1, "it obeys one coordinator"
        is_again = self.me.name == G and (term, coordinator) == self.newest  # after it was silent for long
        assert is_again or term > self.newest[0], "it obeys no older term again, and a term has one coordinator"
        assert COORDINATORS.index(coordinator.name) == term % MAX_COORDINATORS
        self.newest = (term, coordinator)


class _Links:
    """The links of one process: a ``Links`` of which only ``me`` and ``send`` are used."""

    def __init__(self, me: Peer, post: Callable[[Peer, Peer, Message], None]) -> None:
        self.me = me
        self._post = post

    def send(self, peer: Peer, message: Message) -> bool:
        self._post(self.me, peer, message)
        return True

    def reincarnate(self, incarnation: int) -> None:
        raise NotImplementedError

    def connect(self, peer: Peer, address: str, *, takes_bundles: bool = False) -> bool:
        raise NotImplementedError

    def disconnect(self, peer: Peer) -> None:
        raise NotImplementedError


class _World:
    """The processes by name, and a network in which ``fate`` says how each message arrives: the delay of every copy."""

    def __init__(self, count: int = len(COORDINATORS)) -> None:
        self.now = 0.0
        self.processes: dict[str, _Process] = {}
        self.cuts: set[frozenset[str]] = set()
        self.fate: Callable[[], tuple[float, ...]] = lambda: (0.001,)
        self._coordinators = COORDINATORS[:count]
        self._events: list[tuple[float, int, Peer | None, Peer, Message | Peer]] = []
        self._numbers = itertools.count()
        self._incarnations = itertools.count(1)
        self.takeovers: list[tuple[float, int, Peer]] = []

    def start(self, *names: str) -> None:
        for name in names:
            me = Peer(name, next(self._incarnations))
            links = _Links(me, self.post)
            side: Leadership
            if name in COORDINATORS:
                order = Order(self._coordinators.index(name), len(self._coordinators))
                side = CoordinatorSide(links, lambda peer, now: None, order, TAKEOVER_S)
            else:
                side = FollowerSide(links, lambda peer, now: None, lambda peer: None, does_without=name == G)
            side.reset(self.now)
            process = self.processes[name] = _Process(me, side, heartbeat_at=self.now + HEARTBEAT_S)
            for other in self.processes.values():
                if (other.me.name in COORDINATORS) != (name in COORDINATORS):
                    for lost in [peer for peer in other.links if peer.name == name]:
                        self._lose(other, lost)
                    for one, peer in ((process, other.me), (other, me)):
                        self._meet(one, peer)

    def kill(self, name: str) -> None:
        """The others notice within the limit of silence."""
        victim = self.processes.pop(name)
        for other in self.processes.values():
            heapq.heappush(self._events, (self.now + DEATH_S, next(self._numbers), None, other.me, victim.me))

    def post(self, sender: Peer, to: Peer, message: Message) -> None:
        if frozenset((sender.name, to.name)) not in self.cuts:
            for delay_s in self.fate():
                heapq.heappush(self._events, (self.now + delay_s, next(self._numbers), sender, to, message))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            deadlines = [
                max(min(p.side.next_deadline(), p.heartbeat_at), p.paused_until) for p in self.processes.values()
            ]
            at = min([*deadlines, self._events[0][0] if self._events else inf])
            if at > end:
                break
            self.now = max(self.now, at)
            while self._events and self._events[0][0] <= self.now:
                self._arrive()
            for process in list(self.processes.values()):
                self._step(process)
            self._check()
        self.now = end

    def pause(self, name: str, seconds: float) -> None:
        self.processes[name].paused_until = self.now + seconds

    def serving(self) -> list[str]:
        return [name for name, process in self.processes.items() if process.term]

    def obeyed(self) -> dict[str, str]:
        """Follower -> the coordinator that its core sees."""
        return {
            name: next((peer.name for peer in process.up if peer.name in COORDINATORS), "")
            for name, process in self.processes.items()
            if name not in COORDINATORS
        }

    def problems(self) -> list[str]:
        """The deviations from the steady state: one coordinator serves, and all follow it."""
        living = [self.processes[name] for name in COORDINATORS if name in self.processes]
        followers = [process for name, process in self.processes.items() if name not in COORDINATORS]
        if not living or not followers:
            return []
        if len(self.serving()) != 1:
            return [f"{self.serving()} serve"]
        coordinator = self.processes[self.serving()[0]]
        found = [f"{f.me.name} follows {f.newest}" for f in followers if f.newest != (coordinator.term, coordinator.me)]
        found += [f"{f.me.name} does not see it" for f in followers if coordinator.me not in f.up]
        if coordinator.up != {follower.me for follower in followers}:
            found.append(f"{coordinator.me.name} sees {coordinator.up}")
        return found

    def _meet(self, process: _Process, peer: Peer) -> None:
        role = Role.COORDINATOR if peer.name in COORDINATORS else Role.WORKER
        process.links.add(peer)
        process.apply(process.side.on_up(PeerUp(peer, role), self.now))

    def _lose(self, process: _Process, peer: Peer) -> None:
        process.links.discard(peer)
        process.apply(process.side.on_down(peer, self.now))

    def _arrive(self) -> None:
        _, _, sender, to, what = heapq.heappop(self._events)
        process = self.processes.get(to.name)
        if process is None or process.me != to:
            return
        if isinstance(what, Peer):
            if what in process.links:
                self._lose(process, what)
        elif sender is not None:
            process.inbox.append((sender, what))

    def _step(self, process: _Process) -> None:
        if self.now < process.paused_until:
            return
        inbox, process.inbox = process.inbox, []
        for sender, message in inbox:
            if sender in process.links and isinstance(message, Serving | Following):
                self._apply(process, process.side.handle(message, sender, self.now))
        if self.now >= process.side.next_deadline():
            self._apply(process, process.side.tick(self.now, is_behind=False))
        if self.now >= process.heartbeat_at:
            process.heartbeat_at = self.now + HEARTBEAT_S
            for peer in sorted(process.links):
                self.post(process.me, peer, process.side.heartbeat(peer))

    def _apply(self, process: _Process, changes: list[Change]) -> None:
        process.apply(changes)
        for change in changes:
            if isinstance(change, Serve):
                self.takeovers.append((self.now, change.term, process.me))

    def _check(self) -> None:
        terms = [process.term for process in self.processes.values() if process.term]
        assert len(terms) == len(set(terms)), "one coordinator a term"


def _started(*names: str, count: int = len(COORDINATORS)) -> _World:
    world = _World(count)
    world.start(*names)
    world.run(BOUND_S)
    assert world.problems() == []
    return world


def test_the_first_in_the_order_serves() -> None:
    """Of coordinators that start together, the first serves; the others stand by and name it."""
    world = _started(B, C, A, G, W)
    assert world.serving() == [A]
    assert len(world.takeovers) == 1


def test_a_coordinator_that_is_alone_serves_at_once() -> None:
    """Without others in the order there is nothing to wait for."""
    world = _World(1)
    world.start(A, G, W)
    world.run(0.01)
    assert world.problems() == []


@pytest.mark.parametrize(("dead", "heir"), [([A], B), ([A, B], C)])
def test_the_next_in_the_order_takes_over_within_a_second(dead: list[str], heir: str) -> None:
    """The goal: about ``takeover_after_s`` after the deaths, long before silence counts as death."""
    world = _started(*NAMES)
    for name in dead:
        world.kill(name)
    died_at = world.now
    world.run(1.0)
    assert world.problems() == []
    assert world.serving() == [heir]
    assert TAKEOVER_S - TAKEOVER_S / LIMIT <= world.takeovers[-1][0] - died_at < 1.0


def test_a_coordinator_that_is_back_stands_by() -> None:
    """The first in the order comes back as a standby, and takes over only when the second one dies."""
    world = _started(*NAMES)
    world.kill(A)
    world.run(1.0)
    world.start(A)
    world.run(10.0)
    assert (world.serving(), len(world.takeovers)) == ([B], 2)
    world.kill(B)
    world.run(1.0)
    assert world.serving() == [A]
    assert world.problems() == []


def test_a_paused_coordinator_is_ignored_when_it_wakes() -> None:
    """It still believes that it serves, and nobody follows it; at the first answer it stands by."""
    world = _started(*NAMES)
    world.pause(A, 1.5)
    world.run(1.4)
    assert sorted(world.serving()) == [A, B]
    assert set(world.obeyed().values()) == {B}
    world.run(0.3)
    assert world.serving() == [B]
    world.run(5.0)
    assert (world.problems(), len(world.takeovers)) == ([], 2)


def test_a_restart_within_a_tenth_of_a_second_leaves_one_coordinator() -> None:
    """The new incarnation does not know the term of its past, so another one takes over, or it begins a newer one."""
    for count in (1, 3):
        world = _started(*COORDINATORS[:count], G, W, W1, count=count)
        world.kill(A)
        world.run(0.1)
        world.start(A)
        world.run(1.0)
        assert world.problems() == []
        assert world.takeovers[-1][1] > world.takeovers[0][1]


def test_coordinators_that_share_a_follower_do_not_compete() -> None:
    """A split in which all still reach one worker changes nothing, because that worker hears the coordinator."""
    world = _started(*NAMES)
    world.cuts = {frozenset((A, G)), frozenset((A, W))}
    world.run(20.0)
    assert (world.serving(), len(world.takeovers)) == ([A], 1)
    assert world.obeyed()[W1] == A


def test_parts_of_a_split_network_are_one_again_under_the_newer_term() -> None:
    """Each part has a coordinator while the network is split; afterwards all follow the newer one."""
    world = _started(A, B, G, W)
    world.cuts = {frozenset(pair) for pair in ((A, W), (B, G))}
    world.run(20.0)
    assert world.obeyed() == {G: A, W: B}
    world.cuts.clear()
    world.run(BOUND_S)
    assert world.problems() == []
    assert world.serving() == [B]


def test_terms_belong_to_places() -> None:
    """A term's last digit is the place of its coordinator, and the next term is above all that were heard of."""
    assert [next_term(place, 0) for place in (0, 1, 9)] == [10, 11, 19]
    assert [next_term(0, highest) for highest in (10, 13, 19, 20)] == [20, 20, 20, 30]


def test_senseless_terms_and_intervals_change_nothing() -> None:
    """Terms without end are not believed, and no interval makes a follower busy or deaf."""
    follower, coordinator = Follower(), Peer(A, 1)
    assert not follower.on_serving(Serving(2**62, 0.1, True), coordinator, 0.0)
    assert follower.term == 0
    for within_s in (0.0, 1e300):
        assert follower.on_serving(Serving(10, within_s, True), coordinator, 1.0)
        assert 1.001 <= follower.next_deadline() <= 61.0
    candidate = Candidate(Order(0, 2), TAKEOVER_S, 0.0)
    assert not candidate.on_following(Following(2**62, Peer(B, 1), True), Peer(W, 1), coordinator, 0.0)
    assert candidate.highest == 0


def test_a_follower_that_was_paused_still_hears_its_coordinator() -> None:
    """Its own pause counts as one missed interval at most."""
    world = _started(*NAMES)
    world.pause(W, 30.0)
    world.run(35.0)
    assert (world.problems(), len(world.takeovers)) == ([], 1)


_STEPS = st.one_of(
    st.tuples(st.just("run"), st.floats(0.01, 3.0)),
    st.tuples(st.just("kill"), st.sampled_from(NAMES)),
    st.tuples(st.just("start"), st.sampled_from(NAMES)),
    st.tuples(st.just("pause"), st.sampled_from(NAMES)),
    st.tuples(st.just("cut"), st.sampled_from([frozenset((c, f)) for c in COORDINATORS for f in (G, W, W1)])),
    st.tuples(st.just("heal"), st.none()),
)


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(_STEPS, max_size=30),
    seed=st.randoms(use_true_random=False),
    loss=st.sampled_from((0.0, 0.1, 0.5)),
    late=st.sampled_from((0.0, 0.3)),
    count=st.integers(1, 3),
)
def test_whatever_happens_one_serves_in_the_end(  # type: ignore[no-untyped-def]
    steps, seed, loss: float, late: float, count: int
) -> None:
    """While messages are lost, late and repeated, and processes die and pause, no term has two coordinators, and no
    follower goes back to an older one. Soon after the network is sound again, all follow one.
    """

    def fate() -> tuple[float, ...]:
        copies = 0 if seed.random() < loss else 2 if seed.random() < 0.1 else 1
        return tuple(0.001 + (seed.random() if seed.random() < late else 0.0) for _ in range(copies))

    world = _World(count)
    names = [name for name in NAMES if name not in COORDINATORS[count:]]
    world.start(*names)
    world.fate = fate
    for what, value in steps:
        match what:
            case "run":
                world.run(value)
            case "kill" if value in world.processes:
                world.kill(value)
            case "start" if value in names and value not in world.processes:
                world.start(value)
            case "pause" if value in world.processes:
                world.pause(value, 0.1 + 3.0 * seed.random())
            case "cut":
                world.cuts.add(value)
            case "heal":
                world.cuts.clear()
    world.cuts.clear()
    world.fate = lambda: (0.001,)
    world.run(BOUND_S + 3.2)  # and until the last pause is over
    assert world.problems() == []
    num_takeovers = len(world.takeovers)
    world.run(20.0)
    assert world.problems() == []
    assert len(world.takeovers) == num_takeovers


def test_a_gateway_does_without_a_silent_coordinator() -> None:
    """A gateway is without a dead coordinator, if it was the only one, before a second is over; a worker later."""
    world = _started(A, G, W, count=1)
    world.kill(A)
    world.run(1.4 * TAKEOVER_S)
    assert world.obeyed() == {G: A, W: A}
    world.run(0.4 * TAKEOVER_S)
    assert world.obeyed() == {G: "", W: A}
    world.run(DEATH_S)
    assert world.obeyed() == {G: "", W: ""}
    world.start(A)
    world.run(BOUND_S)
    assert world.problems() == []


def test_a_gateway_obeys_a_coordinator_that_was_silent() -> None:
    """A coordinator that pauses for a second is obeyed again by the gateway that did without it, in the same term."""
    world = _started(A, G, W, count=1)
    term = world.processes[A].term
    world.pause(A, 1.0)
    world.run(0.9)
    assert world.obeyed() == {G: "", W: A}
    world.run(0.3)
    assert world.problems() == []
    assert world.processes[A].term == term


def test_a_gateway_with_another_coordinator_is_never_without_one() -> None:
    """Another coordinator takes over before a gateway does without."""
    world = _started(A, B, G, W)
    world.kill(A)
    for _ in range(100):
        world.run(0.01)
        assert world.obeyed()[G] in (A, B)
    assert world.obeyed()[G] == B
