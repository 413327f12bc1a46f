"""Who is in the cluster, and how two processes meet. Deterministic: time is an argument, links are given.

Two processes meet by Hello. An *ask* (``answers`` = 0) goes to whoever is at an address, and is repeated until the
other side's Hello has come; an *answer* names the incarnation that asked. Whoever hears a Hello of a new incarnation
connects, answers an ask, and only then calls the peer up; so on every link our Hello comes before anything else, and
a peer is up here only when what we send will be heard there. Whichever side starts, restarts or loses a frame, one of
the two is still asking until both have met.

Everybody asks the coordinator, whose address is known; it tells all of them who is there (Members), and those who
need each other ask each other. It does so whenever that changes, and again after a while, for a Members may be lost;
where there are many processes Members is long, so that it is told at a pace that leaves time for others, and repeated
less often. A peer that is silent for a while is asked again, which finds its successor at the same address before its
silence counts as death. A process that was held for dead by mistake (it was paused) is told so (Fenced) when it next
says Hello, and rejoins as a new incarnation: nobody ever takes back that an incarnation is dead.

Workers meet each other only on demand (``get_to_know``), at the addresses of which Members told, and watch each other
from then on. Those who met once stay linked until one of them ends, though they may have nothing to move any more.
They fence nobody: two workers that lost each other, though the coordinator hears both, stay apart until one of them is
somebody new. That costs them a few migrations, and rejoining would cost a worker all of its requests.
"""

from collections import Counter, deque
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
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
_HEARTBEAT: Final = Heartbeat()
_ROW_S: Final = 5e-7  # set aside for each row of Members to each peer; it takes less, and the rest is for others
_LEAST_ROWS: Final = 256  # as which a short Members counts
_AT_ONCE_S: Final = 0.032  # so much of that time is saved up in a rest
_TURN_S: Final = 0.008  # and so much passes between two turns
_REPEATING: Final = 32  # times as long as a round takes, at least, until it is repeated
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
    """Somebody whom we want to meet and have not met. One met on demand is given up ``until`` then."""

    address: str
    ask_at: float
    interval_s: float
    until: float = inf


Change = PeerUp | PeerDown


def are_linked(one: Role, other: Role) -> bool:
    """Whether processes of these roles need each other: they meet unasked."""
    return one is not other and (Role.COORDINATOR in (one, other) or {one, other} == {Role.GATEWAY, Role.WORKER})


def may_link(one: Role, other: Role) -> bool:
    """Whether processes of these roles ever talk to each other."""
    return are_linked(one, other) or one is other is Role.WORKER


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
        self._others: dict[str, tuple[Peer, str]] = {}  # where those are whom we meet on demand, by the last Members
        self._answered_at: dict[Peer, float] = {}
        self._fenced_at: dict[str, float] = {}
        self._members = Members((), (), (), ())  # as it is being told
        self._untold: deque[Peer] = deque()
        self._have_changed = False
        self._tell_again_at = inf
        self._paid_until = -inf  # who was told so far has used the time up to then

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Those who are up, in the order of names."""
        return self._watch.alive

    def is_up(self, peer: Peer) -> bool:
        return peer in self._hellos

    def start(self, now: float) -> None:
        """Begin to look for the others."""
        if self._hello.role is Role.COORDINATOR:
            self._tell_again_at = now + self._times.death_after_s
        else:
            self._look_for(COORDINATOR_NAME, self._coordinator_address, now)

    def leave(self) -> None:
        """Tell everybody that we go."""
        for peer in self._watch.alive:
            self._links.send(peer, Goodbye())

    def sent(self, peer: Peer, now: float) -> None:
        """Something went to ``peer``, beside what membership sends itself."""
        self._watch.sent(peer, now)

    def get_to_know(self, peer: Peer, now: float) -> None:
        """Meet this worker, if the coordinator names it; it is up once it has answered.

        Nothing happens for one that is up or being asked, that we lost or that left, or of whom we have not been told.
        One that does not answer is given up after the patience for silence; whoever still needs it asks again.
        """
        known, address = self._others.get(peer.name, (None, ""))
        if known != peer:
            self.counts["meeting nobody whom we know"] += 1
        elif self._watch.standing(peer) is Standing.UNKNOWN:
            self._look_for(peer.name, address, now, now + self._times.death_after_s)

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
            self._on_change(now)
            return [down]
        if type(message) is Members:
            return self._on_members(message, now, sender)
        return None

    def next_deadline(self) -> float | None:
        deadline = self._watch.next_deadline()
        at = inf if deadline is None else deadline
        if self._candidates:
            at = min(at, *(candidate.ask_at for candidate in self._candidates.values()))
        if self._hello.role is Role.COORDINATOR:
            at = min(at, self._next_telling())
        return None if at == inf else at

    def tick(self, now: float, *, is_behind: bool = False) -> list[Change]:
        """Do what is due: heartbeats, asks, deaths. ``is_behind`` says that more may have arrived than we have taken.

        While it is so, silence is borne for longer.
        """
        verdict = self._watch.tick(now, is_behind=is_behind)
        for peer in verdict.heartbeats_due:
            self._links.send(peer, _HEARTBEAT)
        for peer in verdict.suspects:
            self._ask(peer.name, self._hellos[peer].address)
        changes: list[Change] = [self._lose(peer, now) for peer in verdict.dead]
        for name, candidate in list(self._candidates.items()):
            if now >= candidate.ask_at and now >= candidate.until:
                self._stop_looking_for(name)
            elif now >= candidate.ask_at:
                self._ask(name, candidate.address)
                candidate.ask_at = now + candidate.interval_s
                candidate.interval_s = min(2 * candidate.interval_s, self._times.death_after_s)
        if verdict.dead:
            self._on_change(now)
        elif self._hello.role is Role.COORDINATOR:
            self._tell_members(now)
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
        if sender.name == me.name or not may_link(self._hello.role, hello.role):
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
            case Standing.SILENT if are_linked(self._hello.role, hello.role):
                self._fence(sender, hello.address, now)
                return []
            case Standing.SILENT:
                self.counts["apart"] += 1
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
        changes.append(PeerUp(sender, hello.role, hello.worker))
        self._on_change(now)
        return changes

    def _on_members(self, members: Members, now: float, sender: Peer) -> list[Change]:
        if self._hellos[sender].role is not Role.COORDINATOR or self._hello.role is Role.COORDINATOR:
            self.counts["members from a stranger"] += 1
            return []
        changes: list[Change] = []
        wanted = {COORDINATOR_NAME}
        others: dict[str, tuple[Peer, str]] = {}
        rows = zip(members.names, members.incarnations, members.roles, members.addresses, strict=True)
        for name, incarnation, role, address in islice(rows, MAX_PEERS):
            peer = Peer(name, incarnation)
            if name in (COORDINATOR_NAME, self._links.me.name) or not may_link(self._hello.role, role):
                continue
            are_needed = are_linked(self._hello.role, role)
            if not are_needed:
                others[name] = peer, address
            if are_needed or self._others.get(name) == others[name]:
                wanted.add(name)
            changes += self._on_member(peer, role, address, now)
        self._others = others
        for name in [name for name in self._candidates if name not in wanted]:
            self._stop_looking_for(name)
        return changes

    def _on_member(self, peer: Peer, role: Role, address: str, now: float) -> list[Change]:
        """The coordinator hears ``peer``, whom we may link to."""
        are_needed = are_linked(self._hello.role, role)
        standing = self._watch.standing(peer)
        known = Peer(peer.name, self._watch.incarnation_of(peer.name))
        if standing is Standing.SILENT and are_needed and role is Role.WORKER and peer == known:
            # Only we lost each other. One of the two has to come back anew before they may meet again, and the worker
            # has less to lose than a gateway with requests on many workers.
            self._fence(peer, address, now)
        if standing is not Standing.UNKNOWN:
            return []
        changes: list[Change] = []
        if self._watch.give_up(known):
            changes.append(self._drop_link(known))
            self._links.disconnect(Peer(peer.name, _ANY))
        if are_needed:
            self._look_for(peer.name, address, now)
        return changes

    def _look_for(self, name: str, address: str, now: float, until: float = inf) -> None:
        candidate = self._candidates.get(name)
        if candidate is None or candidate.address != address:
            interval_s = self._times.heartbeat_s
            self._candidates[name] = _Candidate(address, now + interval_s, 2 * interval_s, until)
            self._ask(name, address)

    def _stop_looking_for(self, name: str) -> None:
        del self._candidates[name]
        self._links.disconnect(Peer(name, _ANY))

    def _ask(self, name: str, address: str) -> None:
        anyone = Peer(name, _ANY)
        if self._links.connect(anyone, address):
            self._links.send(anyone, self._hello)

    def _answer(self, peer: Peer, now: float) -> bool:
        self._answered_at[peer] = now
        return self._links.send(peer, replace(self._hello, answers=peer.incarnation))

    # --- telling who is there ----------------------------------------------------------------------------------------

    def _on_change(self, now: float) -> None:
        if self._hello.role is Role.COORDINATOR:
            self._have_changed = True
            self._tell_members(now)

    def _next_telling(self) -> float:
        if self._untold or self._have_changed:
            return self._paid_until + _TURN_S
        return self._tell_again_at

    def _tell_members(self, now: float) -> None:
        """Tell as many as the pace allows. All are told one state of things before the next round begins."""
        self._paid_until = max(self._paid_until, now - _AT_ONCE_S)
        while self._paid_until < now:
            if not self._untold:
                if not self._have_changed and now < self._tell_again_at:
                    return
                self._begin_round(now)
                if not self._untold:
                    return
            peer = self._untold.popleft()
            if peer in self._hellos and self._links.send(peer, self._members):
                self._watch.sent(peer, now)
                self._paid_until += _ROW_S * max(len(self._members.names), _LEAST_ROWS)

    def _begin_round(self, now: float) -> None:
        alive = self._watch.alive
        hellos = [self._hellos[peer] for peer in alive]
        self._members = Members(
            tuple(peer.name for peer in alive),
            tuple(peer.incarnation for peer in alive),
            tuple(hello.role for hello in hellos),
            tuple(hello.address for hello in hellos),
        )
        self._untold.extend(alive)
        self._have_changed = False
        round_s = len(alive) * _ROW_S * max(len(alive), _LEAST_ROWS)
        self._tell_again_at = now + max(self._times.death_after_s, _REPEATING * round_s)

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
        self._others.clear()
        self._names.clear()
        self._fenced_at.clear()
        self._untold.clear()
        self._links.reincarnate(incarnation)
        self.start(now)
        return changes
