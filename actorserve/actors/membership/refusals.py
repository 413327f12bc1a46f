"""The peers that were refused, because they do not fit to this process: logged once, counted, and kept to be shown."""

import logging
from dataclasses import dataclass, replace
from typing import Final

from actorserve.actors.membership.links import Links
from actorserve.core.messages import Hello, Peer

_MAX_NAMES: Final = 256  # the peer that was refused the longest ago is forgotten
_log: Final = logging.getLogger("actorserve.membership")


@dataclass(frozen=True, slots=True)
class RefusedPeer:
    """A process that is refused: how many times, why, and when last, in seconds of this process's clock."""

    name: str
    why: str
    times: int
    last_at: float


class Refusals:
    """A refused process gets our Hello in answer, at most once per ``interval_s``, so that it can log both sides'
    values, too.
    """

    def __init__(self, links: Links, interval_s: float) -> None:
        self.total = 0
        self._links = links
        self._interval_s = interval_s
        self._refused: dict[str, RefusedPeer] = {}  # the longest ago first

    @property
    def peers(self) -> tuple[RefusedPeer, ...]:
        """The processes that are refused now, in the order of their names."""
        return tuple(self._refused[name] for name in sorted(self._refused))

    def refuse(self, peer: Peer, why: str, answer: Hello | None, address: str, now: float) -> None:
        """``peer`` is refused. ``answer``: our Hello, for a peer at ``address`` that has asked for it."""
        self.total += 1
        known = self._refused.pop(peer.name, None)
        if known is None or known.why != why:
            _log.warning("%s refuses %s: %s", self._links.me.name, peer.name, why)
            known = RefusedPeer(peer.name, why, 0, float("-inf"))
        if answer is not None and now - known.last_at >= self._interval_s and self._links.connect(peer, address):
            self._links.send(peer, answer)
            self._links.disconnect(peer)
        self._refused[peer.name] = replace(known, times=known.times + 1, last_at=now)
        if len(self._refused) > _MAX_NAMES:
            del self._refused[next(iter(self._refused))]

    def accepted(self, name: str) -> None:
        """The process called ``name`` is a peer now. If it is refused again, that is logged again."""
        self._refused.pop(name, None)
