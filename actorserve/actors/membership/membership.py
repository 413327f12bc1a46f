"""One process's view of the cluster, and how two processes meet.

Two processes meet by Hello. An *ask* (``answers`` = 0) goes to the process at an address, whatever its incarnation, and
is repeated until that process's Hello has come. An *answer* names the incarnation that asked. A process that hears the
Hello of a new incarnation connects to it, answers an ask, and only then takes the peer for up. So our Hello is the
first message on every link, and a peer that is up here can receive our messages. If either side starts, restarts or
loses a frame, one of the two keeps asking until both have met.

All processes ask the coordinators, whose addresses are known. The coordinator that serves (``succession``) sends them
the cluster's members (``introductions``), and processes that need each other then ask each other. A peer that is silent
for a while is asked again. This finds a new incarnation at the same address before the silence counts as death. A
process that counts as dead although it was only paused is told so (``fencing``) when it next says Hello, and rejoins as
a new incarnation. An incarnation that counts as dead is never taken for alive again.

A process of another cluster, of another model or of a protocol that is too far from ours is refused (``identity``,
``refusals``), and both sides log why.

Workers meet each other only on demand (``get_to_know``), at the addresses in Members, and then watch each other
until one of them ends. They do not fence each other. If two workers lose each other while the coordinator still hears
both, they stay apart until one of them is a new incarnation. That costs a few migrations, while rejoining would cost a
worker all of its requests.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from math import inf
from typing import Final

from actorserve.actors.membership.death_watch import DeathWatch, Standing, WatchTimes
from actorserve.actors.membership.fencing import MAX_INCARNATION, Fencing
from actorserve.actors.membership.identity import Identity
from actorserve.actors.membership.introductions import Introductions
from actorserve.actors.membership.leadership import Change, CoordinatorSide, FollowerSide, Leadership
from actorserve.actors.membership.links import Links, anyone
from actorserve.actors.membership.refusals import Refusals
from actorserve.actors.membership.roles import MAX_PEERS, are_linked, may_link
from actorserve.actors.membership.search import Search
from actorserve.actors.membership.succession import Order
from actorserve.core.messages import (
    Fenced,
    Following,
    Goodbye,
    Heartbeat,
    Hello,
    Members,
    Message,
    Peer,
    PeerUp,
    Role,
    Serving,
)

_ANY: Final = 0


class Membership:
    """One process's view of the cluster. ``hello`` describes this process to its peers. ``coordinators`` gives their
    addresses by name, in the order in which they serve. ``refusals`` lists the processes that do not fit to this one.

    The caller must pass the changes that a method returns to the core, in order, before any other message.
    """

    def __init__(self, links: Links, hello: Hello, coordinators: Mapping[str, str], times: WatchTimes) -> None:
        self.counts: Counter[str] = Counter()
        self._links = links
        self._role = hello.role
        self._identity = Identity(replace(hello, answers=_ANY))
        self._coordinators = dict(coordinators)
        self._times = times
        self._watch = DeathWatch(times)
        self._hellos: dict[Peer, Hello] = {}  # of the peers that are up
        self._names: set[str] = set()  # of all peers ever met; their number is bounded
        self._answered_at: dict[Peer, float] = {}
        self._on_demand: dict[str, tuple[Peer, str]] = {}  # workers of the last Members, to meet on demand, by name
        self._search = Search(links, self._identity, times)
        self.refusals = Refusals(links, times.heartbeat_s)
        self._fencing = Fencing(links, self._watch, times)
        is_coordinator = hello.role is Role.COORDINATOR
        self._introductions = Introductions(links, self._watch, self._hellos, times) if is_coordinator else None
        self._leadership: Leadership
        if is_coordinator:
            order = Order(list(self._coordinators).index(links.me.name), len(self._coordinators))
            self._leadership = CoordinatorSide(links, self.sent, order, times.takeover_after_s)
        else:
            does_without = hello.role is Role.GATEWAY
            self._leadership = FollowerSide(links, self.sent, self._ask_again, does_without=does_without)

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The peers that are up as the core sees it, in the order of their names."""
        return tuple(filter(self._leadership.is_up, self._watch.alive))

    def is_up(self, peer: Peer) -> bool:
        """Whether the core has got a PeerUp for ``peer``, and no PeerDown since then."""
        return peer in self._hellos and self._leadership.is_up(peer)

    def start(self, now: float) -> None:
        """Begin to look for the other processes."""
        self._leadership.reset(now)
        if self._introductions is not None:
            self._introductions.start(now)
        else:
            for name, address in self._coordinators.items():
                self._search.begin(name, address, now)

    def leave(self) -> None:
        """Tell all peers that we leave."""
        for peer in self._watch.alive:
            self._links.send(peer, Goodbye())

    def sent(self, peer: Peer, now: float) -> None:
        """The caller has sent something to ``peer``."""
        self._watch.sent(peer, now)

    def get_to_know(self, peer: Peer, now: float) -> None:
        """Meet ``peer``, a worker, if it is in the last Members. It is up once it has answered.

        Nothing happens if the worker is up, was already asked, is lost or is gone. The search for a worker that does
        not answer ends after ``death_after_s``; the caller may ask again.
        """
        known, address = self._on_demand.get(peer.name, (None, ""))
        if known != peer:
            self.counts["meeting an unknown worker"] += 1
        elif self._watch.standing(peer) is Standing.UNKNOWN:
            self._search.begin(peer.name, address, now, now + self._times.death_after_s)

    def handle(self, message: Message, now: float, sender: Peer) -> list[Change] | None:
        """Handle a message from ``sender``. None: the message is for the core, and ``sender`` is up."""
        if type(message) is Hello:
            return self._on_hello(message, now, sender)
        if type(message) is Fenced:
            return self._on_fenced(message, now)
        if not self._watch.heard(sender, now):
            # A peer that counts as dead gets no heartbeats from us. It will soon ask us, and then we fence it.
            self.counts["stranger"] += 1
            return []
        if type(message) is Heartbeat:
            return []
        if type(message) is Goodbye:
            self._watch.leave(sender)
            return self._changed(self._lose(sender, now), now)
        if type(message) is Serving or type(message) is Following:
            return self._changed(self._leadership.handle(message, sender, now), now)
        if not self._leadership.is_up(sender):
            # It is a coordinator that no longer serves, or one of our followers that has not said so yet.
            self.counts["out of term"] += 1
            return []
        if type(message) is Members:
            return self._on_members(message, now, sender)
        return None

    def next_deadline(self) -> float | None:
        deadline = self._watch.next_deadline()
        at = min(inf if deadline is None else deadline, self._search.next_deadline(), self._leadership.next_deadline())
        if self._introductions is not None and self._leadership.introduces:
            at = min(at, self._introductions.next_deadline())
        return None if at == inf else at

    def tick(self, now: float, *, is_behind: bool = False) -> list[Change]:
        """Send due heartbeats and asks, and find deaths.

        ``is_behind``: messages may have arrived that are unread, so a longer silence is allowed.
        """
        verdict = self._watch.tick(now, is_behind=is_behind)
        for peer in verdict.heartbeats_due:
            self._links.send(peer, self._leadership.heartbeat(peer))
        for peer in verdict.suspects:
            self._search.ask(peer.name, self._hellos[peer].address)
        changes = [change for peer in verdict.dead for change in self._lose(peer, now)]
        self._search.tick(now)
        changes += self._leadership.tick(now, is_behind=is_behind)
        if not changes and self._introductions is not None and self._leadership.introduces:
            self._introductions.tell(now)
        return self._changed(changes, now)

    # --- meeting -----------------------------------------------------------------------------------------------------

    def _on_hello(self, hello: Hello, now: float, sender: Peer) -> list[Change]:
        me = self._links.me
        if hello.answers not in (_ANY, me.incarnation):
            # The sender has met an earlier incarnation of ours, but not this one.
            self.counts["hello to our past"] += 1
            return []
        if (hello.role is Role.COORDINATOR) != (sender.name in self._coordinators):
            self.counts["hello of a false coordinator"] += 1
            return []
        if sender.name == me.name or not may_link(self._role, hello.role):
            self.counts["hello of a process without a link to us"] += 1
            return []
        match self._watch.standing(sender):
            case Standing.ALIVE:
                self._watch.heard(sender, now)
                if hello.answers == _ANY and now - self._answered_at[sender] >= self._times.heartbeat_s / 2:
                    self._answer(sender, now)
                return []
            case Standing.UNKNOWN if why := self._identity.mismatch(hello):
                answer = self._answer_to(sender) if hello.answers == _ANY else None
                self.refusals.refuse(sender, why, answer, hello.address, now)
                return []
            case Standing.UNKNOWN:
                return self._meet(hello, now, sender)
            case Standing.SILENT if are_linked(self._role, hello.role):
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
        if not self._links.connect(sender, hello.address, takes_bundles=hello.takes_bundles):
            self.counts["hello with an unusable address"] += 1
            return []
        if hello.answers == _ANY and not self._answer(sender, now):
            # The sender will ask again. It cannot receive our messages before it has our answer.
            self._links.disconnect(sender)
            return []
        changes: list[Change] = []
        replaced = self._watch.meet(sender, now)
        if replaced is not None:
            changes += self._drop_link(replaced, now)
        # The link to any incarnation at this address stays open, because this incarnation uses the same link.
        self._links.connect(anyone(sender.name), hello.address)
        self._search.found(sender.name)
        self._hellos[sender] = hello
        self._names.add(sender.name)
        self.refusals.forget(sender.name)
        self._identity.learn(hello)
        self._answered_at.setdefault(sender, now)
        changes += self._leadership.on_up(PeerUp(sender, hello.role, hello.worker), now)
        return self._changed(changes, now)

    def _answer(self, peer: Peer, now: float) -> bool:
        self._answered_at[peer] = now
        return self._links.send(peer, self._answer_to(peer))

    def _answer_to(self, peer: Peer) -> Hello:
        return replace(self._identity.hello, answers=peer.incarnation)

    def _changed(self, changes: list[Change], now: float) -> list[Change]:
        """The core gets ``changes``, so our followers get other members."""
        if changes and self._introductions is not None and self._leadership.introduces:
            self._introductions.changed(now)
        return changes

    def _ask_again(self, coordinator: Peer) -> None:
        """A coordinator is silent. A new incarnation at its address answers at once."""
        self._search.ask(coordinator.name, self._coordinators[coordinator.name])

    # --- being introduced by the coordinator -------------------------------------------------------------------------

    def _on_members(self, members: Members, now: float, sender: Peer) -> list[Change]:
        if self._hellos[sender].role is not Role.COORDINATOR or self._role is Role.COORDINATOR:
            self.counts["members from a stranger"] += 1
            return []
        changes: list[Change] = []
        wanted = set(self._coordinators)
        on_demand: dict[str, tuple[Peer, str]] = {}
        rows = zip(members.names, members.incarnations, members.roles, members.addresses, strict=True)
        for name, incarnation, role, address in islice(rows, MAX_PEERS):
            peer = Peer(name, incarnation)
            if name in self._coordinators or name == self._links.me.name or not may_link(self._role, role):
                continue
            is_needed = are_linked(self._role, role)
            if not is_needed:
                on_demand[name] = peer, address
            if is_needed or self._on_demand.get(name) == on_demand[name]:
                wanted.add(name)
            changes += self._on_member(peer, role, address, now)
        self._on_demand = on_demand
        self._search.keep_only(wanted)
        return changes

    def _on_member(self, peer: Peer, role: Role, address: str, now: float) -> list[Change]:
        """``peer``, which we may link to, is in the coordinator's Members."""
        is_needed = are_linked(self._role, role)
        standing = self._watch.standing(peer)
        known = Peer(peer.name, self._watch.incarnation_of(peer.name))
        if standing is Standing.SILENT and is_needed and role is Role.WORKER and peer == known:
            # Only we and this peer lost each other. One of us has to rejoin before we may meet again. The worker does,
            # because it has fewer requests to lose than a gateway with requests on many workers.
            self._fence(peer, address, now)
        if standing is not Standing.UNKNOWN:
            return []
        changes: list[Change] = []
        if self._watch.give_up(known):
            changes += self._drop_link(known, now)
            self._links.disconnect(anyone(peer.name))
        if is_needed:
            self._search.begin(peer.name, address, now)
        return changes

    # --- parting -----------------------------------------------------------------------------------------------------

    def _lose(self, peer: Peer, now: float) -> list[Change]:
        """``peer`` is no longer up. If it is a coordinator, we begin to look for it again."""
        changes = self._drop_link(peer, now)
        self._links.disconnect(anyone(peer.name))
        if peer.name in self._coordinators:
            self._search.begin(peer.name, self._coordinators[peer.name], now)
        return changes

    def _drop_link(self, peer: Peer, now: float) -> list[Change]:
        self._links.disconnect(peer)
        self._hellos.pop(peer)
        self._answered_at.pop(peer, None)
        return self._leadership.on_down(peer, now)

    def _fence(self, peer: Peer, address: str, now: float) -> None:
        if self._fencing.fence(peer, address, now):
            self.counts["fenced"] += 1

    def _on_fenced(self, fenced: Fenced, now: float) -> list[Change]:
        incarnation = self._links.me.incarnation
        if fenced.incarnation >= MAX_INCARNATION:
            self.counts["fenced beyond bounds"] += 1
            return []
        if fenced.incarnation < incarnation:
            # The Fenced was for an earlier incarnation of ours. We have already rejoined.
            return []
        return self._rejoin(max(incarnation, fenced.incarnation) + 1, now)

    def _rejoin(self, incarnation: int, now: float) -> list[Change]:
        self.counts["rejoined"] += 1
        changes: list[Change] = []
        for peer in self._watch.release_all():
            changes += self._drop_link(peer, now)
            self._links.disconnect(anyone(peer.name))
        self._search.clear()
        self._on_demand.clear()
        self._names.clear()
        self._fencing.clear()
        self._links.reincarnate(incarnation)
        self.start(now)
        return changes
