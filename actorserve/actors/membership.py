"""Who is in the cluster, and how two processes meet. Deterministic: time is an argument, links are given.

Two processes meet by Hello. An *ask* (``answers`` = 0) goes to whoever is at an address, and is repeated until the
other side's Hello has come; an *answer* names the incarnation that asked. Whoever hears a Hello of a new incarnation
connects, answers an ask, and only then calls the peer up; so on every link our Hello comes before anything else, and
a peer is up here only when what we send will be heard there. Whichever side starts, restarts or loses a frame, one of
the two is still asking until both have met.

Everybody asks the coordinator, whose address is known; it tells all of them who is there (Members), and those who
need each other ask each other. A peer that is silent for a while is asked again, which finds its successor at the same
address before its silence counts as death. A process that was held for dead by mistake (it was paused) is told so
(Fenced) when it next says Hello, and rejoins as a new incarnation: nobody ever takes back that an incarnation is dead.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Final, Protocol

from actorserve.actors.death_watch import DeathWatch, Standing, WatchTimes
from actorserve.core.messages import (
    PROTOCOL_VERSION,
    Fenced,
    Goodbye,
    Heartbeat,
    Hello,
    Members,
    Message,
    Peer,
    PeerDown,
    PeerUp,
    Role,
)

COORDINATOR_NAME: Final = "coordinator"
MAX_PEERS: Final = 4096
_ANY: Final = 0
_MAX_INCARNATION: Final = 2**62  # nobody honest gets there, and the wire has room above it


class Links(Protocol):
    """What membership needs of a transport (``wire.transport.Transport``)."""

    @property
    def me(self) -> Peer: ...

    def reincarnate(self, incarnation: int) -> None: ...

    def connect(self, peer: Peer, address: str) -> bool: ...

    def disconnect(self, peer: Peer) -> None: ...

    def send(self, peer: Peer, message: Message) -> bool: ...


@dataclass(slots=True)
class _Candidate:
    """Somebody whom we want to meet and have not met."""

    address: str
    ask_at: float
    interval_s: float


Change = PeerUp | PeerDown


def are_linked(one: Role, other: Role) -> bool:
    """Whether processes of these roles talk to each other."""
    return one is not other and (Role.COORDINATOR in (one, other) or {one, other} == {Role.GATEWAY, Role.WORKER})


class Membership:
    """One process's view of the cluster. ``hello`` is what it says of itself.

    Every method that returns changes wants them told to the core, in order, before anything else.
    """

    def __init__(self, links: Links, hello: Hello, coordinator_address: str, times: WatchTimes) -> None:
        self.counts: Counter[str] = Counter()
        self._links = links
        self._hello = replace(hello, answers=0)
        self._coordinator_address = coordinator_address
        self._times = times
        self._watch = DeathWatch(times)
        self._hellos: dict[Peer, Hello] = {}  # of those alive
        self._names: set[str] = set()  # of everybody ever met, to bound what we remember
        self._candidates: dict[str, _Candidate] = {}
        self._answered_at: dict[Peer, float] = {}
        self._fenced_at: dict[str, float] = {}
        self._members_at: float | None = None

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Those who are up, in the order of names."""
        return self._watch.alive

    def is_up(self, peer: Peer) -> bool:
        return peer in self._hellos

    def start(self, now: float) -> None:
        """Begin to look for the others."""
        if self._hello.role is Role.COORDINATOR:
            self._members_at = now + self._times.death_after_s
        else:
            self._look_for(COORDINATOR_NAME, self._coordinator_address, now)

    def leave(self) -> None:
        """Tell everybody that we go."""
        for peer in self._watch.alive:
            self._links.send(peer, Goodbye())

    def handle(self, message: Message, now: float, sender: Peer) -> list[Change] | None:
        """Take what came from ``sender``. None says: it is the core's, and ``sender`` is up."""
        if type(message) is Hello:
            return self._on_hello(message, now, sender)
        if type(message) is Fenced:
            if message.incarnation >= _MAX_INCARNATION:
                self.counts["fenced beyond bounds"] += 1
                return []
            if message.incarnation < self._links.me.incarnation:
                # Meant for who we were, before we rejoined.
                return []
            return self._rejoin(max(self._links.me.incarnation, message.incarnation) + 1, now)
        if not self._watch.heard(sender, now):
            # One that we hold for dead gets no heartbeats from us; it will soon ask, and be fenced.
            self.counts["stranger"] += 1
            return []
        if type(message) is Heartbeat:
            return []
        if type(message) is Goodbye:
            self._watch.leave(sender)
            down = self._lose(sender, now)
            self._tell_members()
            return [down]
        if type(message) is Members:
            return self._on_members(message, now, sender)
        return None

    def next_deadline(self) -> float | None:
        deadlines = [candidate.ask_at for candidate in self._candidates.values()]
        deadlines += [at for at in (self._watch.next_deadline(), self._members_at) if at is not None]
        return min(deadlines, default=None)

    def tick(self, now: float) -> list[Change]:
        """Do what is due: heartbeats, asks, deaths."""
        verdict = self._watch.tick(now)
        for peer in verdict.heartbeats_due:
            self._links.send(peer, Heartbeat())
        for peer in verdict.suspects:
            self._ask(peer.name, self._hellos[peer].address)
        changes: list[Change] = [self._lose(peer, now) for peer in verdict.dead]
        for name, candidate in self._candidates.items():
            if now >= candidate.ask_at:
                self._ask(name, candidate.address)
                candidate.ask_at = now + candidate.interval_s
                candidate.interval_s = min(2 * candidate.interval_s, self._times.death_after_s)
        if verdict.dead or (self._members_at is not None and now >= self._members_at):
            self._tell_members()
            if self._members_at is not None:
                self._members_at = now + self._times.death_after_s
        return changes

    # --- meeting -----------------------------------------------------------------------------------------------------

    def _on_hello(self, hello: Hello, now: float, sender: Peer) -> list[Change]:
        me = self._links.me
        if hello.protocol_version != PROTOCOL_VERSION:
            self.counts["hello of another protocol version"] += 1
            return []
        if hello.answers not in (_ANY, me.incarnation):
            # It has met who we were, and does not know who we are.
            self.counts["hello to our past"] += 1
            return []
        is_coordinator = hello.role is Role.COORDINATOR
        if is_coordinator != (sender.name == COORDINATOR_NAME):
            self.counts["hello of a false coordinator"] += 1
            return []
        if sender.name == me.name or not are_linked(self._hello.role, hello.role):
            self.counts["hello of nobody for us"] += 1
            return []
        match self._watch.standing(sender):
            case Standing.ALIVE:
                self._watch.heard(sender, now)
                if hello.answers == _ANY and now - self._answered_at[sender] >= self._times.heartbeat_s / 2:
                    self._answer(sender, now)
                return []
            case Standing.UNKNOWN:
                return self._meet(hello, now, sender)
            case Standing.SILENT:
                self._fence(sender, hello.address, now)
                return []
            case Standing.GONE:
                self.counts["stranger"] += 1
                return []

    def _meet(self, hello: Hello, now: float, sender: Peer) -> list[Change]:
        if sender.name not in self._names and len(self._names) >= MAX_PEERS:
            self.counts["too many peers"] += 1
            return []
        if not self._links.connect(sender, hello.address):
            self.counts["hello with an unusable address"] += 1
            return []
        if hello.answers == _ANY and not self._answer(sender, now):
            # It will ask again; until we could answer, it would not hear us.
            self._links.disconnect(sender)
            return []
        changes: list[Change] = []
        replaced = self._watch.meet(sender, now)
        if replaced is not None:
            changes.append(self._drop_link(replaced))
        # The way to "whoever is there" stays open beside the way to this incarnation: it is the same link.
        self._links.connect(Peer(sender.name, _ANY), hello.address)
        self._candidates.pop(sender.name, None)
        self._hellos[sender] = hello
        self._names.add(sender.name)
        self._answered_at.setdefault(sender, now)
        changes.append(PeerUp(sender, hello.role, hello.kind, hello.model, hello.speed))
        self._tell_members()
        return changes

    def _on_members(self, members: Members, now: float, sender: Peer) -> list[Change]:
        if self._hellos[sender].role is not Role.COORDINATOR or self._hello.role is Role.COORDINATOR:
            self.counts["members from a stranger"] += 1
            return []
        changes: list[Change] = []
        wanted = {COORDINATOR_NAME, self._links.me.name}
        rows = zip(members.names, members.incarnations, members.roles, members.addresses, strict=True)
        for name, incarnation, role, address in rows:
            peer = Peer(name, incarnation)
            if name in wanted or not are_linked(self._hello.role, role) or len(wanted) > MAX_PEERS:
                continue
            wanted.add(name)
            standing = self._watch.standing(peer)
            if standing is Standing.SILENT and role is Role.WORKER and incarnation == self._watch.incarnation_of(name):
                # The coordinator hears it: only we lost each other. One of the two has to come back anew before they
                # may meet again, and the worker has less to lose than a gateway with requests on many workers.
                self._fence(peer, address, now)
            if standing is not Standing.UNKNOWN:
                continue
            known = self._watch.incarnation_of(name)
            if self._watch.give_up(Peer(name, known)):
                changes.append(self._drop_link(Peer(name, known)))
            self._look_for(name, address, now)
        for name in [name for name in self._candidates if name not in wanted]:
            del self._candidates[name]
            self._links.disconnect(Peer(name, _ANY))
        return changes

    def _look_for(self, name: str, address: str, now: float) -> None:
        candidate = self._candidates.get(name)
        if candidate is None or candidate.address != address:
            self._candidates[name] = _Candidate(address, now + self._times.heartbeat_s, 2 * self._times.heartbeat_s)
            self._ask(name, address)

    def _ask(self, name: str, address: str) -> None:
        anyone = Peer(name, _ANY)
        if self._links.connect(anyone, address):
            self._links.send(anyone, self._hello)

    def _answer(self, peer: Peer, now: float) -> bool:
        self._answered_at[peer] = now
        return self._links.send(peer, replace(self._hello, answers=peer.incarnation))

    def _tell_members(self) -> None:
        if self._hello.role is not Role.COORDINATOR:
            return
        alive = self._watch.alive
        hellos = [self._hellos[peer] for peer in alive]
        members = Members(
            tuple(peer.name for peer in alive),
            tuple(peer.incarnation for peer in alive),
            tuple(hello.role for hello in hellos),
            tuple(hello.address for hello in hellos),
        )
        for peer in alive:
            self._links.send(peer, members)

    # --- parting -----------------------------------------------------------------------------------------------------

    def _lose(self, peer: Peer, now: float) -> PeerDown:
        """``peer`` is no more; the coordinator is looked for again."""
        down = self._drop_link(peer)
        self._links.disconnect(Peer(peer.name, _ANY))
        if peer.name == COORDINATOR_NAME:
            self._look_for(COORDINATOR_NAME, self._coordinator_address, now)
        return down

    def _drop_link(self, peer: Peer) -> PeerDown:
        self._links.disconnect(peer)
        self._hellos.pop(peer)
        self._answered_at.pop(peer, None)
        return PeerDown(peer)

    def _fence(self, peer: Peer, address: str, now: float) -> None:
        if now - self._fenced_at.get(peer.name, float("-inf")) < self._times.heartbeat_s:
            return
        self._fenced_at[peer.name] = now
        self.counts["fenced"] += 1
        if self._links.connect(peer, address):
            self._links.send(peer, Fenced(self._watch.incarnation_of(peer.name)))
            self._links.disconnect(peer)

    def _rejoin(self, incarnation: int, now: float) -> list[Change]:
        self.counts["rejoined"] += 1
        changes: list[Change] = []
        for peer in self._watch.release_all():
            changes.append(self._drop_link(peer))
            self._links.disconnect(Peer(peer.name, _ANY))
        for name in self._candidates:
            self._links.disconnect(Peer(name, _ANY))
        self._candidates.clear()
        self._names.clear()
        self._fenced_at.clear()
        self._links.reincarnate(incarnation)
        self.start(now)
        return changes
