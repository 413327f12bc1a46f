"""Which peers are alive: heartbeats, silence, and incarnations. Pure: time is an argument.

Silence is measured in our own running time. ``tick`` runs once per heartbeat interval, and the time between two ticks
counts as one interval at most. If a tick comes late, this process was slow or paused (a stopped process, a suspended
machine, a blocked loop), and its peers' messages may still be unread. While unread messages may wait, the limits of
silence are five times as long, because a heartbeat may be among them. They stay finite, so that a process that never
catches up also notices dead peers.

Every message shows a peer that we are alive, so a heartbeat is due only to a peer to which we sent nothing for one
interval. If heartbeats are due to many peers at once, they are spread over the following slots.
"""

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice, takewhile
from typing import Final, NamedTuple

from actorserve.core.messages import Peer

_SLOTS: Final = 16  # per heartbeat interval; the heartbeats are spread over them
_BEATS_AT_ONCE: Final = 16  # per slot, or twice a slot's share of all heartbeats if that is more
_PATIENCE_WHEN_BEHIND: Final = 5  # times the usual limit of silence


class Standing(Enum):
    """The state of an incarnation, as we see it."""

    UNKNOWN = auto()  # never met
    ALIVE = auto()
    SILENT = auto()  # dead to us, or older than an incarnation that we met; its process has to rejoin
    GONE = auto()  # it said goodbye


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """A peer that is silent for ``suspect_after_s`` is asked again; after ``death_after_s`` it counts as dead. The next
    coordinator serves if the last one is silent for ``takeover_after_s``.
    """

    heartbeat_s: float
    death_after_s: float
    takeover_after_s: float = 0.5

    @property
    def suspect_after_s(self) -> float:
        return min(2.5 * self.heartbeat_s, self.death_after_s)


class Verdict(NamedTuple):
    """The result of a tick. ``heartbeats_due`` begins with the peer to which we last sent something the longest ago.

    The other two tuples are in the order of names.
    """

    heartbeats_due: tuple[Peer, ...] = ()
    suspects: tuple[Peer, ...] = ()
    dead: tuple[Peer, ...] = ()


@dataclass(frozen=True, slots=True)
class _Past:
    """The newest incarnation of a name that has ended."""

    incarnation: int
    said_goodbye: bool


class DeathWatch:
    """The state of every peer that we have met."""

    def __init__(self, times: WatchTimes) -> None:
        self._times = times
        self._heard_at: OrderedDict[Peer, float] = OrderedDict()  # in running time; the most silent peer first
        self._sent_at: OrderedDict[Peer, float] = OrderedDict()  # the longest ago first
        self._alive: dict[str, Peer] = {}
        self._past: dict[str, _Past] = {}
        self._ran_s = 0.0  # our running time at the last tick
        self._looked_at = 0.0
        self._beat_at = 0.0

    @property
    def alive(self) -> tuple[Peer, ...]:
        """The peers that count as alive, in the order of names."""
        return tuple(self._alive[name] for name in sorted(self._alive))

    def incarnation_of(self, name: str) -> int:
        """The newest incarnation of ``name`` that we ever met, alive or not; 0 for a name that we never met."""
        alive, past = self._alive.get(name), self._past.get(name)
        return max(alive.incarnation if alive else 0, past.incarnation if past else 0)

    def standing(self, peer: Peer) -> Standing:
        if self._alive.get(peer.name) == peer:
            return Standing.ALIVE
        past = self._past.get(peer.name)
        if past is not None and past.incarnation == peer.incarnation:
            return Standing.GONE if past.said_goodbye else Standing.SILENT
        return Standing.SILENT if peer.incarnation < self.incarnation_of(peer.name) else Standing.UNKNOWN

    def meet(self, peer: Peer, now: float) -> Peer | None:
        """Watch ``peer``, which said hello, and whose standing is UNKNOWN.

        Returns the older incarnation that ``peer`` replaces, if it was alive until now.

        Raises: ValueError for a peer that is not unknown.
        """
        if self.standing(peer) is not Standing.UNKNOWN:
            raise ValueError(f"{peer} is known already")
        replaced = self._alive.get(peer.name)
        if replaced is not None:
            self._end(replaced, said_goodbye=False)
        if not self._alive:
            self._looked_at = self._beat_at = now
        self._alive[peer.name] = peer
        self._heard_at[peer] = self._running_s(now)
        self._sent_at[peer] = now
        return replaced

    def heard(self, peer: Peer, now: float) -> bool:
        """A message came from ``peer``. Returns False, and changes nothing, if ``peer`` does not count as alive."""
        if peer not in self._heard_at:
            return False
        self._heard_at[peer] = self._running_s(now)
        self._heard_at.move_to_end(peer)
        return True

    def sent(self, peer: Peer, now: float) -> None:
        """We sent a message to ``peer``. Nothing happens if ``peer`` does not count as alive."""
        if peer in self._sent_at:
            self._sent_at[peer] = now
            self._sent_at.move_to_end(peer)

    def leave(self, peer: Peer) -> bool:
        """``peer`` said goodbye. False if it did not count as alive."""
        if peer not in self._heard_at:
            return False
        self._end(peer, said_goodbye=True)
        return True

    def give_up(self, peer: Peer) -> bool:
        """``peer`` has ended, because its name has a newer incarnation. False if it did not count as alive."""
        if peer not in self._heard_at:
            return False
        self._end(peer, said_goodbye=False)
        return True

    def release_all(self) -> tuple[Peer, ...]:
        """Forget all peers, alive or not, because we are a new incarnation. Returns the peers that were alive."""
        alive = self.alive
        self._past.clear()
        self._alive.clear()
        self._heard_at.clear()
        self._sent_at.clear()
        return alive

    def next_deadline(self) -> float | None:
        """When to call ``tick``. A tick finds a death at most one ``heartbeat_s`` late."""
        if not self._alive:
            return None
        longest_ago = next(iter(self._sent_at.values()))
        return min(self._looked_at + self._times.heartbeat_s, max(longest_ago + self._times.heartbeat_s, self._beat_at))

    def tick(self, now: float, *, is_behind: bool = False) -> Verdict:
        """Check the peers' silence. Call it at the deadline. ``is_behind``: messages may be unread."""
        suspects: tuple[Peer, ...] = ()
        dead: tuple[Peer, ...] = ()
        if self._alive and now >= self._looked_at + self._times.heartbeat_s:
            self._ran_s, self._looked_at = self._running_s(now), now
            dead = self._silent_for(self._times.death_after_s * (_PATIENCE_WHEN_BEHIND if is_behind else 1))
            for peer in dead:
                self._end(peer, said_goodbye=False)
            suspects = () if is_behind else self._silent_for(self._times.suspect_after_s)
        return Verdict(self._take_beats(now), suspects, dead)

    def _take_beats(self, now: float) -> tuple[Peer, ...]:
        if now < self._beat_at:
            return ()
        limit = max(_BEATS_AT_ONCE, 2 * len(self._alive) // _SLOTS)
        last_s = self._times.heartbeat_s
        due = tuple(islice(takewhile(lambda peer: now >= self._sent_at[peer] + last_s, self._sent_at), limit))
        for peer in due:
            self.sent(peer, now)
        if due:
            self._beat_at = now + self._times.heartbeat_s / _SLOTS
        return due

    def _silent_for(self, seconds: float) -> tuple[Peer, ...]:
        silent = takewhile(lambda peer: self._ran_s - self._heard_at[peer] >= seconds, self._heard_at)
        return tuple(sorted(silent))

    def _running_s(self, now: float) -> float:
        return self._ran_s + min(now - self._looked_at, self._times.heartbeat_s)

    def _end(self, peer: Peer, said_goodbye: bool) -> None:
        del self._alive[peer.name]
        del self._heard_at[peer]
        del self._sent_at[peer]
        self._past[peer.name] = _Past(peer.incarnation, said_goodbye)
