"""Fencing: telling a process that it counts as dead, so that it rejoins as a new incarnation."""

from typing import Final

from actorserve.actors.membership.death_watch import DeathWatch, WatchTimes
from actorserve.actors.membership.links import Links
from actorserve.core.messages import Fenced, Peer

MAX_INCARNATION: Final = 2**62  # no correct process reaches it, and the wire can carry larger numbers


class Fencing:
    """Fences a name at most once per heartbeat interval."""

    def __init__(self, links: Links, watch: DeathWatch, times: WatchTimes) -> None:
        self._links = links
        self._watch = watch
        self._interval_s = times.heartbeat_s
        self._fenced_at: dict[str, float] = {}

    def fence(self, peer: Peer, address: str, now: float) -> bool:
        """Tell ``peer`` that it counts as dead. False if its name was fenced within the last heartbeat interval."""
        if now - self._fenced_at.get(peer.name, float("-inf")) < self._interval_s:
            return False
        self._fenced_at[peer.name] = now
        if self._links.connect(peer, address):
            self._links.send(peer, Fenced(self._watch.incarnation_of(peer.name)))
            self._links.disconnect(peer)
        return True

    def clear(self) -> None:
        """Forget the times of all fencings."""
        self._fenced_at.clear()
