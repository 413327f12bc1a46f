"""Fencing: telling a process that it is held for dead, so that it rejoins as a new incarnation."""

from typing import Final

from actorserve.actors.membership.death_watch import DeathWatch, WatchTimes
from actorserve.actors.membership.links import Links
from actorserve.core.messages import Fenced, Peer

MAX_INCARNATION: Final = 2**62  # no honest process gets there, and the wire has room above it


class Fencing:
    """Fences each name at most once in a heartbeat's time."""

    def __init__(self, links: Links, watch: DeathWatch, times: WatchTimes) -> None:
        self._links = links
        self._watch = watch
        self._interval_s = times.heartbeat_s
        self._fenced_at: dict[str, float] = {}

    def fence(self, peer: Peer, address: str, now: float) -> bool:
        """Tell ``peer``, which we hold for dead. False when its name was fenced a moment ago."""
        if now - self._fenced_at.get(peer.name, float("-inf")) < self._interval_s:
            return False
        self._fenced_at[peer.name] = now
        if self._links.connect(peer, address):
            self._links.send(peer, Fenced(self._watch.incarnation_of(peer.name)))
            self._links.disconnect(peer)
        return True

    def clear(self) -> None:
        """Forget when names were fenced."""
        self._fenced_at.clear()
