"""How the coordinator introduces the processes to each other: it sends all of them the cluster's members (Members).

It sends Members after every change, and repeats it, because a Members may be lost. In a large cluster Members is long
and has many recipients. So its rate is limited, to leave the coordinator time for other work, and repeats are rarer.
"""

from collections import deque
from collections.abc import Mapping
from math import inf
from typing import Final

from actorserve.actors.membership.death_watch import DeathWatch, WatchTimes
from actorserve.actors.membership.links import Links
from actorserve.core.messages import Hello, Members, Peer, Role

_ROW_S: Final = 5e-7  # time budget per row of a Members and peer; sending takes less, and the rest is for other work
_LEAST_ROWS: Final = 256  # a shorter Members costs as much as one with this many rows
_AT_ONCE_S: Final = 0.032  # at most this much of the time budget is saved up while nothing is sent
_TURN_S: Final = 0.008  # between two turns of a round
_REPEATING: Final = 32  # a round is repeated after at least this many times its own duration


class Introductions:
    """Sends Members in rounds. In one round all peers get the same Members.

    ``hellos`` holds the peers that are up. Its owner updates it and then calls ``changed``.
    """

    def __init__(self, links: Links, watch: DeathWatch, hellos: Mapping[Peer, Hello], times: WatchTimes) -> None:
        self._links = links
        self._watch = watch
        self._hellos = hellos
        self._times = times
        self._members = Members((), (), (), ())  # of the current round
        self._untold: deque[Peer] = deque()
        self._have_changed = False
        self._tell_again_at = inf
        self._paid_until = -inf  # the messages so far have used up the time budget until this moment

    def start(self, now: float) -> None:
        """Begin with an empty round."""
        self._untold.clear()
        self._tell_again_at = now + self._times.death_after_s

    def changed(self, now: float) -> None:
        """A peer came or went."""
        self._have_changed = True
        self.tell(now)

    def next_deadline(self) -> float:
        """When to call ``tell``."""
        if self._untold or self._have_changed:
            return self._paid_until + _TURN_S
        return self._tell_again_at

    def tell(self, now: float) -> None:
        """Send Members to as many peers as the rate allows. A round ends before the next one begins."""
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
        # Nothing but coordinators meets actuators of power caps, and the last version cannot read their role.
        members = [peer for peer in alive if self._hellos[peer].role is not Role.POWER]
        hellos = [self._hellos[peer] for peer in members]
        self._members = Members(
            tuple(peer.name for peer in members),
            tuple(peer.incarnation for peer in members),
            tuple(hello.role for hello in hellos),
            tuple(hello.address for hello in hellos),
        )
        self._untold.extend(alive)
        self._have_changed = False
        round_s = len(alive) * _ROW_S * max(len(alive), _LEAST_ROWS)
        self._tell_again_at = now + max(self._times.death_after_s, _REPEATING * round_s)
