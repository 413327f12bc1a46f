"""Who is alive: heartbeats, silence, and incarnations. Pure: time is an argument.

Silence is measured in our own running time. When a tick comes late, it was we who were paused (a stopped process, a
suspended machine, a blocked loop): what peers sent meanwhile may still be unread, so they all get fresh patience.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from actorserve.core.messages import Peer


class Standing(Enum):
    """What we think of an incarnation."""

    UNKNOWN = auto()  # never met
    ALIVE = auto()
    SILENT = auto()  # we gave it up, or it is older than one that we met: whoever it is has to come back anew
    GONE = auto()  # it said goodbye


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """Silence for ``suspect_after_s`` is reason to ask, for ``death_after_s`` death; our own ``late_s`` excuses it."""

    heartbeat_s: float = 0.25
    death_after_s: float = 2.0

    @property
    def suspect_after_s(self) -> float:
        return min(2.5 * self.heartbeat_s, self.death_after_s)

    @property
    def late_s(self) -> float:
        return max(self.death_after_s / 2, self.heartbeat_s)


class Verdict(NamedTuple):
    """What a tick found, each in the order of names."""

    heartbeats_due: tuple[Peer, ...] = ()
    suspects: tuple[Peer, ...] = ()
    dead: tuple[Peer, ...] = ()


@dataclass(frozen=True, slots=True)
class _Past:
    """The newest incarnation of a name that is over."""

    incarnation: int
    said_goodbye: bool


class DeathWatch:
    """Bookkeeping for every peer that we have met."""

    def __init__(self, times: WatchTimes) -> None:
        self._times = times
        self._heard_at: dict[Peer, float] = {}
        self._alive: dict[str, Peer] = {}
        self._past: dict[str, _Past] = {}
        self._next_beat_at: float | None = None

    @property
    def alive(self) -> tuple[Peer, ...]:
        """Those whom we hold for alive, in the order of names."""
        return tuple(self._alive[name] for name in sorted(self._alive))

    def incarnation_of(self, name: str) -> int:
        """The newest incarnation of ``name`` that we ever met, alive or not; 0 if none."""
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
        """``peer`` (standing UNKNOWN) said hello: watch it. Returns whom it replaces, if that was alive: now dead.

        Raises: ValueError for a peer that is not unknown.
        """
        if self.standing(peer) is not Standing.UNKNOWN:
            raise ValueError(f"{peer} is known already")
        replaced = self._alive.get(peer.name)
        if replaced is not None:
            self._end(replaced, said_goodbye=False)
        self._alive[peer.name] = peer
        self._heard_at[peer] = now
        if self._next_beat_at is None:
            self._next_beat_at = now + self._times.heartbeat_s
        return replaced

    def heard(self, peer: Peer, now: float) -> bool:
        """A sign of life. False where we do not hold ``peer`` for alive: then it changes nothing."""
        if peer not in self._heard_at:
            return False
        self._heard_at[peer] = now
        return True

    def leave(self, peer: Peer) -> bool:
        """``peer`` said goodbye. False where we do not hold it for alive."""
        if peer not in self._heard_at:
            return False
        self._end(peer, said_goodbye=True)
        return True

    def give_up(self, peer: Peer) -> bool:
        """``peer`` is known to be over (its name has a newer incarnation). False where it was not alive to us."""
        if peer not in self._heard_at:
            return False
        self._end(peer, said_goodbye=False)
        return True

    def release_all(self) -> tuple[Peer, ...]:
        """Forget everybody, alive or not: we are somebody else now. Returns who was alive."""
        alive = self.alive
        self._past.clear()
        self._alive.clear()
        self._heard_at.clear()
        self._next_beat_at = None
        return alive

    def next_deadline(self) -> float | None:
        """When to tick. Death is seen at a beat, at most one ``heartbeat_s`` late."""
        return self._next_beat_at if self._alive else None

    def tick(self, now: float) -> Verdict:
        """To be called at the deadline, after what has arrived was heard."""
        if self._next_beat_at is None or now < self._next_beat_at:
            return Verdict()
        if now - self._next_beat_at > self._times.late_s:
            for peer in self._heard_at:
                self._heard_at[peer] = now
        self._next_beat_at = now + self._times.heartbeat_s
        alive = self.alive
        dead = tuple(peer for peer in alive if now - self._heard_at[peer] >= self._times.death_after_s)
        for peer in dead:
            self._end(peer, said_goodbye=False)
        living = self.alive
        suspects = tuple(peer for peer in living if now - self._heard_at[peer] >= self._times.suspect_after_s)
        return Verdict(living, suspects, dead)

    def _end(self, peer: Peer, said_goodbye: bool) -> None:
        del self._alive[peer.name]
        del self._heard_at[peer]
        self._past[peer.name] = _Past(peer.incarnation, said_goodbye)
