"""Copies of KV that an iteration still writes: in one piece once all of it is written, or layer by layer."""

from collections.abc import Callable
from dataclasses import dataclass

from actorserve.core.effects import Fetch
from actorserve.core.messages import CopyDone
from actorserve.sim.links.links import Links, OnDone
from actorserve.sim.simulated_process import Process
from actorserve.sim.timeline import Timeline


@dataclass(slots=True)
class _Copy:
    """A copy that waits for an iteration, or has waited. ``last_s``: when the last layer's KV is written, if this is
    still to be copied.
    """

    fetch: Fetch
    began_s: float
    last_s: float | None = None


class FollowingCopies:
    """Begins copies by a rule for links, when the iterations that write their KV allow it.

    A layer writes its KV first, as real engines do, so the last layer's is written a layer's time before the iteration
    ends. Layer by layer, all layers but the last are one copy here, which begins at once. The last layer is another
    copy, which begins when its KV is written and the first copy has ended: so the whole ends with the last layer's
    copy, or when the links have moved all bytes, whichever is later.
    """

    def __init__(self, timeline: Timeline, make_links: Callable[[OnDone], Links], on_done: OnDone) -> None:
        self._timeline = timeline
        self._links = make_links(self._copied)
        self._on_done = on_done
        self._copies: dict[tuple[Process, int], _Copy] = {}  # by destination and copy id

    def begin(self, fetch: Fetch, source: Process, destination: Process) -> None:
        step = source.step_in_flight(fetch.ticket.step_id)
        if step is None:
            self._links.begin(fetch, source, destination)
            return
        now, (ends_s, duration_s) = self._timeline.now, step
        num_layers = source.worker_core.config.migration.num_layers
        last_s = max(now, ends_s - duration_s / num_layers)
        copy = self._copies[destination, fetch.copy_id] = _Copy(fetch, now)
        if fetch.ticket.by_layer:
            copy.last_s = last_s
            begins_s = max(now, ends_s - duration_s)
            self._timeline.at(begins_s, self._links.begin, fetch, source, destination, 1.0 - 1.0 / num_layers)
        else:
            self._timeline.at(last_s, self._links.begin, fetch, source, destination)

    def _copied(self, destination: Process, source: Process, done: CopyDone) -> None:
        now, key = self._timeline.now, (destination, done.copy_id)
        copy = self._copies.pop(key, None)
        if copy is None:
            self._on_done(destination, source, done)
        elif copy.last_s is None:
            self._on_done(destination, source, CopyDone(done.copy_id, now - copy.began_s))
        else:
            begins_s, copy.last_s = max(now, copy.last_s), None
            self._copies[key] = copy
            share = 1.0 / source.worker_core.config.migration.num_layers
            self._timeline.at(begins_s, self._links.begin, copy.fetch, source, destination, share)
