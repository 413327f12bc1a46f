"""How a process takes part in the succession of coordinators (``succession``), and what its core sees of that.

To the core of a gateway or worker, only the coordinator that it obeys is up. To the core of a coordinator that serves,
the processes that follow it are up; to the core of a standby, none is. Messages of all others do not reach the core.
"""

import logging
from collections.abc import Callable, Iterable
from math import inf
from typing import Final, Protocol

from actorserve.actors.membership.links import Links
from actorserve.actors.membership.succession import Candidate, Follower, Order
from actorserve.core.messages import (
    Following,
    Heartbeat,
    Message,
    Peer,
    PeerDown,
    PeerUp,
    Role,
    Serve,
    Serving,
    StandBy,
)

Change = PeerUp | PeerDown | Serve | StandBy
_HEARTBEAT: Final = Heartbeat()
_log: Final = logging.getLogger("actorserve.succession")


class Leadership(Protocol):
    """One side of the protocol. Methods return the changes that the core must get, in order."""

    @property
    def introduces(self) -> bool:
        """Whether this process introduces the others to each other."""
        ...

    def is_up(self, peer: Peer) -> bool:
        """Whether ``peer``, to which there is a link, is up as the core sees it."""
        ...

    def on_up(self, change: PeerUp, now: float) -> list[Change]:
        """There is a link to a peer."""
        ...

    def on_down(self, peer: Peer, now: float) -> list[Change]:
        """The link to a peer has ended."""
        ...

    def handle(self, message: Serving | Following, sender: Peer, now: float) -> list[Change]: ...

    def heartbeat(self, peer: Peer) -> Message:
        """What to send to a peer that has got nothing from us for a while."""
        ...

    def next_deadline(self) -> float: ...

    def tick(self, now: float, *, is_behind: bool) -> list[Change]: ...

    def reset(self, now: float) -> None:
        """We are a new incarnation, and have no links (any more)."""
        ...


class FollowerSide:
    """The side of a gateway or worker. ``sent`` is told of every peer that we sent a message to, and ``ask`` looks for
    a new incarnation of a coordinator. A process that ``does_without`` a coordinator, as gateways do, takes one for
    down long before its silence counts as death.
    """

    introduces = False

    def __init__(
        self,
        links: Links,
        sent: Callable[[Peer, float], None],
        ask: Callable[[Peer], None],
        *,
        does_without: bool = False,
    ) -> None:
        self._links = links
        self._sent = sent
        self._ask = ask
        self._does_without = does_without
        self._follower = Follower()
        self._coordinators: set[Peer] = set()  # to which there are links
        self._obeyed: Peer | None = None

    def is_up(self, peer: Peer) -> bool:
        return peer not in self._coordinators or peer == self._obeyed

    def on_up(self, change: PeerUp, now: float) -> list[Change]:
        if change.role is not Role.COORDINATOR:
            return [change]
        self._coordinators.add(change.peer)
        self._testify([change.peer], now)
        return []

    def on_down(self, peer: Peer, now: float) -> list[Change]:
        if peer not in self._coordinators:
            return [PeerDown(peer)]
        self._coordinators.discard(peer)
        if self._follower.on_down(peer):
            self._testify(self._coordinators, now)
        return self._obey(None) if peer == self._obeyed else []

    def handle(self, message: Serving | Following, sender: Peer, now: float) -> list[Change]:
        if not isinstance(message, Serving) or sender not in self._coordinators:
            return []
        before = self._follower.term
        if not self._follower.on_serving(message, sender, now):
            self._testify([sender], now)
            return []
        changes: list[Change] = []
        if self._follower.term != before:
            _log.info("%s follows %s in term %d", self._links.me.name, sender.name, message.term)
            changes = self._obey(None)
        if sender != self._obeyed:
            changes += self._obey(sender)
        self._testify([peer for peer in self._coordinators if message.answer or peer != sender], now)
        return changes

    def heartbeat(self, peer: Peer) -> Message:
        # Only a new Serving is news of a coordinator that is heard.
        is_bereft = peer in self._coordinators and not self._follower.hears
        return self._follower.testimony() if is_bereft else _HEARTBEAT

    def next_deadline(self) -> float:
        return self._follower.next_deadline()

    def tick(self, now: float, *, is_behind: bool) -> list[Change]:
        if not self._follower.tick(now, is_behind=is_behind):
            return []
        self._testify(self._coordinators, now)
        silent = self._follower.coordinator
        if silent is not None and silent in self._coordinators:
            self._ask(silent)
        if self._obeyed is None or self._follower.is_patient or not self._does_without:
            return []
        _log.warning(
            "%s does without a coordinator, because it does not hear %s", self._links.me.name, self._obeyed.name
        )
        return self._obey(None)

    def reset(self, now: float) -> None:
        self._coordinators.clear()
        self._obeyed = None
        self._follower.hears = False

    def _obey(self, coordinator: Peer | None) -> list[Change]:
        changes: list[Change] = [] if self._obeyed is None else [PeerDown(self._obeyed)]
        self._obeyed = coordinator
        if coordinator is not None:
            changes.append(PeerUp(coordinator, Role.COORDINATOR, None, self._follower.term))
        return changes

    def _testify(self, coordinators: Iterable[Peer], now: float) -> None:
        testimony = self._follower.testimony()
        for peer in sorted(coordinators):
            if self._links.send(peer, testimony):
                self._sent(peer, now)


class CoordinatorSide:
    """The side of a coordinator, which has its place in ``order``."""

    def __init__(
        self,
        links: Links,
        sent: Callable[[Peer, float], None],
        order: Order,
        takeover_after_s: float,
    ) -> None:
        self._links = links
        self._sent = sent
        self._order = order
        self._takeover_after_s = takeover_after_s
        self._candidate = Candidate(order, takeover_after_s, 0.0)
        self._ups: dict[Peer, PeerUp] = {}  # of the peers to which there are links
        self._say_at = inf
        self._shown: StandBy | None = None  # what the core was told last; None while it serves
        self._is_new = True

    @property
    def introduces(self) -> bool:
        return self._candidate.term > 0

    def is_up(self, peer: Peer) -> bool:
        return peer in self._candidate.followers

    def on_up(self, change: PeerUp, now: float) -> list[Change]:
        self._ups[change.peer] = change
        if self._candidate.term:
            self._say([change.peer], now)
        return []

    def on_down(self, peer: Peer, now: float) -> list[Change]:
        self._ups.pop(peer, None)
        was_up = self.is_up(peer)
        self._candidate.on_down(peer)
        return [PeerDown(peer)] if was_up else []

    def handle(self, message: Serving | Following, sender: Peer, now: float) -> list[Change]:
        if not isinstance(message, Following) or sender not in self._ups:
            return []
        was_up, me = self.is_up(sender), self._links.me
        changes: list[Change] = []
        if self._candidate.on_following(message, sender, me, now):
            other = message.coordinator
            _log.warning(
                "%s stands by after term %d, because %s follows %s in term %d",
                me.name,
                self._candidate.term,
                sender.name,
                "" if other is None else other.name,
                message.term,
            )
            changes += [PeerDown(peer) for peer in sorted(self._candidate.followers)]
            self._candidate.stand_by()
            self._say_at = inf
            # What the follower has said also counts for a standby.
            self._candidate.on_following(message, sender, me, now)
        elif not was_up and self.is_up(sender):
            changes.append(self._ups[sender])
        changes += self._show()
        # Otherwise a tick begins, because unread messages may tell of a coordinator that is heard.
        return changes + self._begin(now) if self._order.is_alone else changes

    def heartbeat(self, peer: Peer) -> Message:
        return _HEARTBEAT

    def next_deadline(self) -> float:
        return -inf if self._is_new else min(self._candidate.next_deadline(), self._say_at)

    def tick(self, now: float, *, is_behind: bool) -> list[Change]:
        changes = self._show()
        if not is_behind:
            changes += self._begin(now)
        if now >= self._say_at:
            self._say(self._ups, now)
            self._say_at = now + self._candidate.within_s(len(self._ups))
        return changes

    def reset(self, now: float) -> None:
        self._candidate.reset(now)
        self._ups.clear()
        self._say_at = inf
        self._is_new = True

    def _begin(self, now: float) -> list[Change]:
        if not self._candidate.begins(now):
            return []
        candidate, me = self._candidate, self._links.me
        after = "" if candidate.other is None else f", after {candidate.other.name}"
        _log.warning("%s serves in term %d%s", me.name, candidate.term, after)
        self._shown, self._is_new = None, False
        self._say(self._ups, now)
        self._say_at = now + candidate.within_s(len(self._ups))
        return [Serve(candidate.term, me.name)]

    def _show(self) -> list[Change]:
        """A standby's core is told who serves, when that changes. A coordinator that is alone has no standby."""
        self._is_new = False
        if self._candidate.term or self._order.is_alone:
            return []
        other = self._candidate.other
        shown = StandBy(self._candidate.highest, "" if other is None else other.name)
        if shown == self._shown:
            return []
        self._shown = shown
        if other is not None:
            _log.info("%s stands by: %s serves in term %d", self._links.me.name, other.name, shown.term)
        return [shown]

    def _say(self, peers: Iterable[Peer], now: float) -> None:
        within_s = self._candidate.within_s(len(self._ups))
        for peer in peers:
            if self._links.send(peer, self._candidate.serving(peer, within_s)):
                self._sent(peer, now)
