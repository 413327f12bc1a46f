"""Links whose bandwidth concurrent copies share."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from actorserve.core.effects import Fetch
from actorserve.core.messages import CopyDone
from actorserve.sim.engine_model import EngineModel
from actorserve.sim.simulated_process import Process
from actorserve.sim.timeline import Timeline


@dataclass(eq=False, slots=True)
class _Flow:
    """A copy under way. ``left_bytes`` were left at ``at_s``, and move at ``rate`` bytes per second since then."""

    fetch: Fetch
    source: Process
    destination: Process
    began_s: float
    left_bytes: float
    pace: float  # bytes per second of all flows from the source to the destination that are not urgent
    at_s: float
    rate: float = 0.0
    moved_s: float | None = None  # when the last byte will have moved, if it is known

    @property
    def ends(self) -> tuple[EngineModel, EngineModel]:
        return self.source.worker_engine, self.destination.worker_engine


@dataclass(slots=True)
class _Direction:
    """The flows out of a machine, or into it."""

    flows: list[_Flow] = field(default_factory=list)

    def share(self, flow: _Flow, bytes_per_s: float) -> float:
        """Of the bandwidth, for one of these flows."""
        num_urgent = sum(other.fetch.is_urgent for other in self.flows)
        if flow.fetch.is_urgent:
            return bytes_per_s / num_urgent
        return 0.0 if num_urgent else bytes_per_s / len(self.flows)


class SharedLinks:
    """Copies out of one machine share its bandwidth equally, and so do copies into one machine. A copy moves at the
    smaller of its two shares; what it leaves of the greater one stays unused, so a link may carry a little less than
    real ones do. Both directions of a link have the whole bandwidth, as InfiniBand's have.

    Urgent copies go first: while a machine has one in a direction, its other copies in that direction stand still.
    ``migration.bytes_per_s`` paces the copies from one machine to another that are not urgent.
    """

    def __init__(self, timeline: Timeline, on_done: Callable[[Process, Process, CopyDone], None]) -> None:
        self._timeline = timeline
        self._on_done = on_done
        self._out: dict[EngineModel, _Direction] = {}
        self._in: dict[EngineModel, _Direction] = {}

    def begin(self, fetch: Fetch, source: Process, destination: Process, share: float = 1.0) -> None:
        now = self._timeline.now
        num_bytes = share * destination.worker_engine.num_bytes(len(fetch.blocks))
        if not num_bytes:
            self._timeline.at(now, self._on_done, destination, source, CopyDone(fetch.copy_id, 0.0))
            return
        pace = destination.worker_core.config.migration.bytes_per_s
        flow = _Flow(fetch, source, destination, now, num_bytes, math.inf if pace is None else pace, now)
        self._out.setdefault(source.worker_engine, _Direction()).flows.append(flow)
        self._in.setdefault(destination.worker_engine, _Direction()).flows.append(flow)
        self._share_again(flow)

    def _share_again(self, changed: _Flow) -> None:
        """A flow has begun or ended, so the flows that share a link with it change their rates."""
        source, destination = changed.ends
        flows = [*self._out[source].flows, *self._in[destination].flows]
        for flow in dict.fromkeys(flows):
            self._set_rate(flow, self._rate(flow))

    def _rate(self, flow: _Flow) -> float:
        source, destination = flow.ends
        out, into = self._out[source], self._in[destination]
        rate = min(
            out.share(flow, source.link_bytes_per_s),
            into.share(flow, destination.link_bytes_per_s),
        )
        if flow.fetch.is_urgent or flow.pace == math.inf:
            return rate
        num_paced = sum(not other.fetch.is_urgent and other.source is flow.source for other in into.flows)
        return min(rate, flow.pace / num_paced)

    def _set_rate(self, flow: _Flow, rate: float) -> None:
        if rate == flow.rate:
            return
        now = self._timeline.now
        flow.left_bytes -= flow.rate * (now - flow.at_s)
        flow.at_s, flow.rate, flow.moved_s = now, rate, None
        if rate:
            flow.moved_s = moved_s = now + max(0.0, flow.left_bytes) / rate
            source, destination = flow.ends
            destination.slow_down(source, moved_s, flow.fetch.into_host)
            self._timeline.at(moved_s, self._moved, flow, moved_s)

    def _moved(self, flow: _Flow, moved_s: float) -> None:
        if flow.moved_s != moved_s:
            return  # its rate has changed
        flow.moved_s = None
        source, destination = flow.ends
        for directions, engine in ((self._out, source), (self._in, destination)):
            directions[engine].flows.remove(flow)
        self._share_again(flow)
        for directions, engine in ((self._out, source), (self._in, destination)):
            if not directions[engine].flows:
                del directions[engine]
        done_s = self._timeline.now + destination.link_latency_s(source)
        done = CopyDone(flow.fetch.copy_id, done_s - flow.began_s)
        self._timeline.at(done_s, self._on_done, flow.destination, flow.source, done)
