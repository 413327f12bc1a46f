"""The peers that were refused, because they do not fit to this process: logged once, counted, and kept to be shown."""

import logging
from dataclasses import dataclass, replace
from typing import Final

from actorserve.actors.membership.links import Links
from actorserve.core.messages import Hello, Peer

_MAX_NAMES: Final = 256  # the peer that was refused the longest ago is forgotten
_LINES_A_MINUTE: Final = 20
_ANSWERS_AN_INTERVAL: Final = 64
_log: Final = logging.getLogger("actorserve.membership")


@dataclass(frozen=True, slots=True)
class RefusedPeer:
    """A process that is refused: how many times, why, and when last, in seconds of this process's clock."""

    name: str
    why: str
    times: int
    last_at: float


class _Budget:
    """Allows ``limit`` uses in each period."""

    def __init__(self, limit: int, period_s: float) -> None:
        self._limit = limit
        self._period_s = period_s
        self._left = 0
        self._refill_at = float("-inf")

    def take(self, now: float) -> bool:
        if now >= self._refill_at:
            self._left, self._refill_at = self._limit, now + self._period_s
        self._left -= 1
        return self._left >= 0


class Refusals:
    """A refused process gets our Hello in answer, at most once per ``interval_s``, so that it can log both sides'
    values, too. Lines and answers are limited, because anything that reaches our socket can send Hellos.
    """

    def __init__(self, links: Links, interval_s: float) -> None:
        self.total = 0
        self._links = links
        self._interval_s = interval_s
        self._refused: dict[str, RefusedPeer] = {}  # the longest ago first
        self._logged: dict[str, str] = {}  # name -> why, of those of them that were logged
        self._lines = _Budget(_LINES_A_MINUTE, 60.0)
        self._answers = _Budget(_ANSWERS_AN_INTERVAL, interval_s)

    @property
    def peers(self) -> tuple[RefusedPeer, ...]:
        """The processes that are refused now, in the order of their names."""
        return tuple(self._refused[name] for name in sorted(self._refused))

    def refuse(self, peer: Peer, why: str, answer: Hello | None, address: str, now: float) -> None:
        """``peer`` is refused. ``answer``: our Hello, for a peer at ``address`` that has asked for it."""
        self.total += 1
        known = self._refused.pop(peer.name, None)
        if known is None or known.why != why:
            known = RefusedPeer(peer.name, why, 0, float("-inf"))
        if self._logged.get(peer.name) != why and self._lines.take(now):
            self._logged[peer.name] = why
            _log.warning("%s refuses %s: %s", self._links.me.name, peer.name, why)
        if answer is not None and now - known.last_at >= self._interval_s and self._answers.take(now):
            self._answer(peer, answer, address)
        self._refused[peer.name] = replace(known, times=known.times + 1, last_at=now)
        if len(self._refused) > _MAX_NAMES:
            self.forget(next(iter(self._refused)))

    def forget(self, name: str) -> None:
        """The process called ``name`` is a peer now. If it is refused again, that is logged again."""
        self._refused.pop(name, None)
        self._logged.pop(name, None)

    def _answer(self, peer: Peer, answer: Hello, address: str) -> None:
        if self._links.connect(peer, address):
            self._links.send(peer, answer)
            self._links.disconnect(peer)
