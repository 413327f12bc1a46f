"""Which coordinator serves: the protocol of succession. Pure: time is an argument, and messages are values.

Coordinators C0, C1, ... stand in the order of the cluster's file. Their followers are the gateways and workers. At any
time a follower obeys one coordinator, the one of the newest term that it knows. Coordinators do not talk to each other,
because what counts is whether followers hear them.

Terms. A term is a number, and its last decimal digit is the place of the coordinator that may serve in it: C0 serves in
terms 10, 20, ..., and C1 in 11, 21, ... So no two coordinators serve in one term. Terms only grow.

The coordinator that serves in term t says Serving(t) to every follower, again and again.

A follower that knows term u, in which coordinator c serves, gets Serving(t) from d:
    if t > u, or u is 0:    u := t; c := d. It obeys d from now on, and ignores c.
    if t = u and d = c:     it still hears c, and tells the other coordinators: Following(u, c, hears).
    otherwise:              it ignores d, and answers: Following(u, c, hears or not).
It no longer hears c after LIMIT intervals without Serving(u), or when c counts as dead. It then tells all coordinators
again and again: Following(u, c, not hears). If no coordinator has taken over PATIENCE intervals later, a gateway does
without one, until it gets the next Serving that it obeys.

A coordinator Ci gets Following(u, c, hears):
    if Ci serves in t, and u >= t, and c is not Ci:  it stands by, and forgets all that it has learned.
    if c is another coordinator, and hears:          it notes that a coordinator is heard at this moment.
    if not hears:                                    it notes that the follower is bereft.
It begins to serve when it stands by, knows a bereft follower, and no follower has heard another coordinator for
``takeover_after_s``, plus a quarter of that for each coordinator before it in the order. Its term is the next one of
its own above all that it has heard of.

Why this is right:
- Safe. Only Ci begins terms that end in i, and an incarnation of Ci begins each term once. If a restarted Ci repeats a
  term of its past, followers of that term ignore it, because c names the incarnation, and Ci takes the next one. A
  follower obeys one coordinator at a time, and never an older one again. Hence a coordinator that was paused, or that
  comes back from a split network, is ignored wherever a newer one is known, however late its messages arrive. Clocks do
  not matter for this.
- Live. If all that lives can talk to each other, and no term begins for a while, one coordinator serves: while none is
  heard, every follower becomes bereft, and the first living coordinator in the order waits the shortest time. If two
  begin at once, followers obey the newer term, tell the other coordinator, and it stands by.
- Stable. If coordinators cannot reach each other but both reach some follower that hears one of them, the other stands
  by. A coordinator that is back stands by as well, although it may be the first in the order: each change costs the
  queue its order and gains nothing. The order decides only about successors.
- Split. Parts of a network that cannot talk at all are served apart, each by its own first coordinator. Followers that
  reach both parts obey the newer term, and so do all when the network is whole again.
"""

from dataclasses import dataclass
from math import inf
from typing import Final

from actorserve.core.messages import Following, Peer, Serving

MAX_COORDINATORS: Final = 10
LIMIT: Final = 4  # intervals without a Serving, after which a follower no longer hears its coordinator
PATIENCE: Final = 3  # further intervals, in which another coordinator would have taken over
_SERVINGS_PER_S: Final = 2000.0  # sent by a coordinator; sending all of them takes some percent of a core
_MAX_TERM: Final = 2**62  # no correct process reaches it, and the wire can carry larger numbers
_BOUNDS_S: Final = (0.001, 60.0)  # of the interval that a coordinator may announce


def next_term(place: int, highest: int) -> int:
    """The first term above ``highest`` of the coordinator at this place in the order, from 0."""
    return (highest // MAX_COORDINATORS + 1) * MAX_COORDINATORS + place


class Follower:
    """What a gateway or worker knows: the newest term, its coordinator, and whether it still hears it."""

    def __init__(self) -> None:
        self.term = 0
        self.coordinator: Peer | None = None
        self.hears = False
        self._within_s = 0.0
        self._num_missed = 0
        self._look_at = inf

    def on_serving(self, message: Serving, sender: Peer, now: float) -> bool:
        """Whether to obey ``sender``."""
        if message.term >= _MAX_TERM or message.term < self.term:
            return False
        if message.term == self.term and sender != self.coordinator:
            return False
        self.term, self.coordinator, self.hears = message.term, sender, True
        self._within_s = min(max(message.within_s, _BOUNDS_S[0]), _BOUNDS_S[1])
        self._num_missed = 0
        self._look_at = now + self._within_s
        return True

    def on_down(self, coordinator: Peer) -> bool:
        """A coordinator counts as dead. Whether it is the one that we heard."""
        if coordinator != self.coordinator or not self.hears:
            return False
        self.hears = False
        return True

    @property
    def is_patient(self) -> bool:
        """Whether the coordinator may only be late, or another one about to take over."""
        return self._num_missed < LIMIT + PATIENCE

    def next_deadline(self) -> float:
        return self._look_at

    def tick(self, now: float, *, is_behind: bool) -> bool:
        """Whether to tell the coordinators that we are bereft. ``is_behind``: messages may be unread.

        A pause of ours counts as one interval at most, but small delays do not add up.
        """
        if now < self._look_at:
            return False
        late_s = now - self._look_at
        self._look_at = now + self._within_s - (late_s if late_s < self._within_s else 0.0)
        if not is_behind:
            self._num_missed += 1
        if self._num_missed >= LIMIT:
            self.hears = False
        return not self.hears

    def testimony(self) -> Following:
        return Following(self.term, self.coordinator, self.hears)


@dataclass(frozen=True, slots=True)
class Order:
    """The order of the coordinators: our place in it, from 0, and how many there are."""

    place: int
    count: int

    @property
    def is_alone(self) -> bool:
        return self.count == 1


class Candidate:
    """What a coordinator knows. ``term``: the one in which it serves; 0 while it stands by."""

    def __init__(self, order: Order, takeover_after_s: float, now: float) -> None:
        self.term = 0
        self.highest = 0  # of all terms that we have heard of or served in
        self.other: Peer | None = None  # the coordinator of the newest term that was heard of, if it is not us
        self.followers: set[Peer] = set()  # those that follow us
        self._order = order
        self._takeover_after_s = takeover_after_s
        # A coordinator that is alone has no other to wait for.
        self._patience_s = 0.0 if order.is_alone else takeover_after_s * (1 + order.place / LIMIT)
        self._heard_at = now  # the last moment at which a follower heard another coordinator
        self._bereft: set[Peer] = set()

    def on_following(self, message: Following, sender: Peer, me: Peer, now: float) -> bool:
        """A follower has said whom it follows. Whether we have to stand by from now on."""
        if message.term >= _MAX_TERM:
            return False
        other = None if message.coordinator is None or message.coordinator == me else message.coordinator
        if message.term >= self.highest and other is not None:
            self.other = other
        self.highest = max(self.highest, message.term)
        # A follower may still hear our own past, which has ended.
        hears_other = message.hears and other is not None and other.name != me.name
        if hears_other:
            self._heard_at = now
        if message.hears and (hears_other or message.coordinator == me):
            self._bereft.discard(sender)
        else:
            self._bereft.add(sender)
        if self.term and message.term == self.term and other is None:
            self.followers.add(sender)
        return bool(self.term) and message.term >= self.term and other is not None

    def on_down(self, follower: Peer) -> None:
        self._bereft.discard(follower)
        self.followers.discard(follower)

    def stand_by(self) -> None:
        """Serve no longer."""
        self.term = 0
        self.followers.clear()
        self._bereft.clear()

    def reset(self, now: float) -> None:
        """We are a new incarnation, and know no follower. The terms that we have heard of still count."""
        self.stand_by()
        self._heard_at = now

    def next_deadline(self) -> float:
        """When to call ``begins``; inf for not before the next message."""
        return inf if self.term or not self._bereft else self._heard_at + self._patience_s

    def begins(self, now: float) -> bool:
        """Begin to serve, if it is our turn. Returns whether we do."""
        if now < self.next_deadline():
            return False
        self.term = self.highest = next_term(self._order.place, self.highest)
        self._bereft.clear()
        return True

    def within_s(self, num_followers: int) -> float:
        """The time between two Servings to the same follower: long enough for all of them."""
        return max(self._takeover_after_s / LIMIT, num_followers / _SERVINGS_PER_S)

    def serving(self, follower: Peer, within_s: float) -> Serving:
        return Serving(self.term, within_s, follower not in self.followers)
