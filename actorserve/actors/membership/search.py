"""The search for processes: asking at an address repeatedly, until the Hello of the process there has come."""

from collections.abc import Container
from dataclasses import dataclass
from math import inf

from actorserve.actors.membership.death_watch import WatchTimes
from actorserve.actors.membership.identity import Identity
from actorserve.actors.membership.links import Links, anyone


@dataclass(slots=True)
class _Wanted:
    """A process that we want to meet. The search for it ends at ``until``."""

    address: str
    ask_at: float
    interval_s: float
    until: float


class Search:
    """The processes that we look for, by name. The Hello of ``identity`` is our ask."""

    def __init__(self, links: Links, identity: Identity, times: WatchTimes) -> None:
        self._links = links
        self._identity = identity
        self._times = times
        self._wanted: dict[str, _Wanted] = {}

    def begin(self, name: str, address: str, now: float, until: float = inf) -> None:
        """Look for the process called ``name``. Nothing happens if we already look for it at this address."""
        wanted = self._wanted.get(name)
        if wanted is None or wanted.address != address:
            interval_s = self._times.heartbeat_s
            self._wanted[name] = _Wanted(address, now + interval_s, 2 * interval_s, until)
            self.ask(name, address)

    def ask(self, name: str, address: str) -> None:
        """Ask once."""
        if self._links.connect(anyone(name), address):
            self._links.send(anyone(name), self._identity.hello)

    def found(self, name: str) -> None:
        """The process has answered. End the search; the link to it stays open."""
        self._wanted.pop(name, None)

    def keep_only(self, names: Container[str]) -> None:
        """End the search for all other processes."""
        for name in [name for name in self._wanted if name not in names]:
            self._give_up(name)

    def clear(self) -> None:
        """End the search for all processes."""
        self.keep_only(())

    def next_deadline(self) -> float:
        """When to call ``tick``; inf for never."""
        return min((wanted.ask_at for wanted in self._wanted.values()), default=inf)

    def tick(self, now: float) -> None:
        """Send the asks that are due. The interval between asks doubles, up to ``death_after_s``."""
        for name, wanted in list(self._wanted.items()):
            if now < wanted.ask_at:
                continue
            if now >= wanted.until:
                self._give_up(name)
            else:
                self.ask(name, wanted.address)
                wanted.ask_at = now + wanted.interval_s
                wanted.interval_s = min(2 * wanted.interval_s, self._times.death_after_s)

    def _give_up(self, name: str) -> None:
        del self._wanted[name]
        self._links.disconnect(anyone(name))
