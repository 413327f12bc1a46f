"""Migration pairing: which instance moves requests to which (Llumnix, section 4.4.3).

Each round the instances under one freeness are sources and those over another are destinations; the lowest is paired
with the highest, within one kind, so that a request's tokens stay the same. A source keeps going until it is no longer
one. Its worker chooses the requests (``core.migration.source``); here is only decided between whom, and how much at
most:

- half of what the destination has free more than the source, which makes both equal; or one request of the source's
  mean size where that is more, as long as the destination stays clearly freer: a source of few large requests could
  move none otherwise;
- so little that the destination stays over the bound at which a source stops, if its newcomers are of the source's mean
  size: a move never makes another source.

What a link can carry is not asked: nobody knows it better than the source, which weighs a move's gain against its cost
by the measured bandwidth. What it has not moved when the order's time is over counts no more.

A terminating instance is a source whatever its load, for all that it has, and goes to one destination after another.
A request that waits in the cluster until an instance has room for it counts there as the head of the line. So that
instance becomes a source, and small requests make room for the big one: de-fragmentation, by Llumnix's own rule.

Against storms: a source stops at a higher freeness than it starts at, and rests afterwards; who received does not send
for as long. A pair of which nothing came is left alone, for twice as long each time. At most ``max_moves`` go on.

All state is soft: after a restart the first round begins anew with what instances report.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Final

from actorserve.core.effects import Send
from actorserve.core.kv.block_allocator import blocks_for
from actorserve.core.messages import MigrateTo, Peer
from actorserve.core.placement.fleet import Fleet, InstanceView

MAX_BACKOFF_S: Final = 60.0
"""A pair that fails again and again is tried this often all the same."""

PATIENCE: Final = 10
"""What is under way at the end of an order is waited for, up to so many times its ``ttl_s``."""


@dataclass(frozen=True, slots=True)
class PairingConfig:
    """Bounds of freeness are in iterations: how many tokens each request of the batch can still generate.

    An instance below ``source_below`` sends until it is above ``source_until``; an instance above ``destination_above``
    may receive. An order holds for ``ttl_s``. For ``rest_s`` a source does not receive and a destination does not send.
    Raises: ValueError if the three bounds do not rise, because an instance would send and receive in turn.
    """

    source_below: float = 32.0
    source_until: float = 64.0
    destination_above: float = 128.0
    ttl_s: float = 1.0
    rest_s: float = 2.0
    max_moves: int = 64

    def __post_init__(self) -> None:
        if not self.source_below <= self.source_until <= self.destination_above:
            raise ValueError(
                f"migration's bounds must rise: source_below {self.source_below}, source_until {self.source_until}, "
                f"destination_above {self.destination_above}"
            )


@dataclass(slots=True)
class Move:
    """An order that a source has: of ``num_bytes`` it has not reported ``left_bytes`` handed over, until it expires."""

    source: InstanceView
    destination: InstanceView
    num_bytes: int
    left_bytes: int
    expires_s: float
    migrated_bytes: int  # the source's counts when the order was given
    num_migrated: int
    num_failed: int


@dataclass(frozen=True, slots=True)
class _Backoff:
    until_s: float
    num_failures: int


class Pairing:
    """Who moves to whom now. It counts what is on its way in the fleet's views."""

    def __init__(self, config: PairingConfig, fleet: Fleet) -> None:
        self.moves: dict[Peer, Move] = {}  # by source
        self._config = config
        self._fleet = fleet
        self._no_source_until_s: dict[Peer, float] = {}
        self._no_destination_until_s: dict[Peer, float] = {}
        self._backoffs: dict[tuple[Peer, Peer], _Backoff] = {}  # by source and destination

    def on_report(self, view: InstanceView) -> None:
        """What a source has handed over is in its destination's report, or soon will be."""
        move = self.moves.get(view.peer)
        if move is not None and move.source is view and move.left_bytes and view.report is not None:
            moved_bytes = view.report.migrated_bytes - move.migrated_bytes
            self._count(move, max(0, move.num_bytes - max(0, moved_bytes)))

    def on_down(self, peer: Peer) -> None:
        """Nothing comes from there or goes there any more."""
        for move in [each for each in self.moves.values() if peer in (each.source.peer, each.destination.peer)]:
            self._end(move)
        self._no_source_until_s.pop(peer, None)
        self._no_destination_until_s.pop(peer, None)
        self._backoffs = {pair: each for pair, each in self._backoffs.items() if peer not in pair}

    def round(self, now: float) -> list[Send]:
        """What sources are to be told now."""
        self._forget_what_is_over(now)
        orders: list[Send] = []
        for move in list(self.moves.values()):
            self._review(move, now, orders)
        loads = {view.peer: _iterations(view) for view in self._fleet.views.values() if _is_heard(view)}
        taken = {peer for move in self.moves.values() for peer in (move.source.peer, move.destination.peer)}
        free = [peer for peer in loads if peer not in taken]
        sources = sorted((loads[peer], peer) for peer in free if self._is_source(self._fleet.views[peer], loads[peer]))
        if sources:
            self._pair([peer for _, peer in sources], self._destinations(free, loads), now, orders)
        return orders

    # --- moves under way ---------------------------------------------------------------------------------------------

    def _review(self, move: Move, now: float, orders: list[Send]) -> None:
        """End an order that is fulfilled, over, or of no use any more; and learn from how it went."""
        source, destination, report = move.source, move.destination, move.source.report
        assert report is not None
        num_migrated = report.num_migrated - move.num_migrated
        num_failed = report.num_migrations_failed - move.num_failed
        pair = source.peer, destination.peer
        if num_migrated > 0:
            self._backoffs.pop(pair, None)
        is_over = now >= move.expires_s
        is_busy = report.num_migrating > 0 and now < move.expires_s + PATIENCE * self._config.ttl_s
        if is_over:
            self._count(move, 0)
        is_welcome = _is_heard(destination) and _iterations(destination) >= self._config.source_below
        if not _is_heard(source) or not is_welcome:
            self._stop(move, now, orders)
        elif _iterations(source) >= self._config.source_until:
            self._stop(move, now, orders)
            self._rest(source.peer, now)
        elif is_busy:
            return  # what is under way decides whether more is to go
        elif num_migrated <= 0 and (is_over or num_failed > 0):
            self._stop(move, now, orders)
            num_failures = 1 + (self._backoffs[pair].num_failures if pair in self._backoffs else 0)
            backoff_s = min(self._config.rest_s * 2.0 ** min(num_failures - 1, 30), MAX_BACKOFF_S)
            self._backoffs[pair] = _Backoff(now + backoff_s, num_failures)
        elif is_over or not move.left_bytes:
            self._end(move)

    def _stop(self, move: Move, now: float, orders: list[Send]) -> None:
        """End it before its time."""
        if now < move.expires_s and move.source.peer in self._fleet.views:
            orders.append(Send(move.source.peer, MigrateTo(move.destination.peer, 0, 0.0)))
        self._end(move)

    def _end(self, move: Move) -> None:
        self._count(move, 0)
        del self.moves[move.source.peer]

    def _count(self, move: Move, left_bytes: int) -> None:
        if left_bytes != move.left_bytes:
            self._fleet.promise(move.destination, left_bytes - move.left_bytes)
            move.left_bytes = left_bytes

    def _rest(self, source: Peer, now: float) -> None:
        self._no_source_until_s[source] = self._no_destination_until_s[source] = now + self._config.rest_s

    def _forget_what_is_over(self, now: float) -> None:
        for times in (self._no_source_until_s, self._no_destination_until_s):
            for peer in [peer for peer, until_s in times.items() if until_s <= now]:
                del times[peer]
        for pair in [pair for pair, each in self._backoffs.items() if each.until_s + MAX_BACKOFF_S <= now]:
            del self._backoffs[pair]

    # --- new pairs ---------------------------------------------------------------------------------------------------

    def _is_source(self, view: InstanceView, iterations: float) -> bool:
        report = view.report
        assert report is not None
        has_requests = report.num_running + report.num_waiting > 0
        may_start = view.is_terminating or view.peer not in self._no_source_until_s
        return has_requests and may_start and iterations < self._config.source_below

    def _destinations(self, free: Iterable[Peer], loads: Mapping[Peer, float]) -> dict[str, list[Peer]]:
        """By kind, those that may receive, the freest last."""
        found: dict[str, list[tuple[float, Peer]]] = defaultdict(list)
        for peer in free:
            view = self._fleet.views[peer]
            may_receive = view.reserved_for is None and peer not in self._no_destination_until_s
            if may_receive and loads[peer] > self._config.destination_above:
                found[view.kind].append((loads[peer], peer))
        return {kind: [peer for _, peer in sorted(each)] for kind, each in found.items()}

    def _pair(
        self, sources: Sequence[Peer], destinations: dict[str, list[Peer]], now: float, orders: list[Send]
    ) -> None:
        for peer in sources:
            if len(self.moves) >= self._config.max_moves:
                return
            source = self._fleet.views[peer]
            open_ = destinations.get(source.kind, [])
            index = next((i for i in reversed(range(len(open_))) if self._may_pair(peer, open_[i], now)), None)
            if index is None:
                continue
            destination = self._fleet.views[open_[index]]
            num_bytes = self._bytes_to_move(source, destination)
            if num_bytes > 0:
                del open_[index]
                self._begin(source, destination, num_bytes, now, orders)

    def _may_pair(self, source: Peer, destination: Peer, now: float) -> bool:
        backoff = self._backoffs.get((source, destination))
        return backoff is None or backoff.until_s <= now

    def _begin(
        self, source: InstanceView, destination: InstanceView, num_bytes: int, now: float, orders: list[Send]
    ) -> None:
        report, ttl_s = source.report, self._config.ttl_s
        assert report is not None
        self.moves[source.peer] = move = Move(
            source,
            destination,
            num_bytes,
            0,
            now + ttl_s,
            report.migrated_bytes,
            report.num_migrated,
            report.num_migrations_failed,
        )
        self._count(move, num_bytes)
        self._no_source_until_s[destination.peer] = now + ttl_s + self._config.rest_s
        orders.append(Send(source.peer, MigrateTo(destination.peer, num_bytes, ttl_s)))

    def _bytes_to_move(self, source: InstanceView, destination: InstanceView) -> int:
        """As much as the module's rules let go; 0 where that is less than a block."""
        report, other = source.report, destination.report
        assert report is not None
        assert other is not None
        held_bytes = report.kv_needed_bytes + report.kv_wanted_bytes
        free_bytes = destination.free_bytes()
        mean_bytes = max(held_bytes / (report.num_running + report.num_waiting), report.bytes_per_block)
        wanted_bytes = held_bytes
        if not source.is_terminating:
            gap_bytes = free_bytes - _free_bytes(source)
            wanted_bytes = min(wanted_bytes, max(gap_bytes // 2, min(ceil(mean_bytes), gap_bytes * 3 // 4)))
        # (free - x) / (B + x / mean) >= least, solved for x
        least_bytes = self._config.source_until * other.bytes_per_block / other.tokens_per_block
        spare_bytes = (free_bytes - least_bytes * max(1, destination.num_running)) / (1.0 + least_bytes / mean_bytes)
        num_bytes = min(wanted_bytes, int(spare_bytes))
        return num_bytes if num_bytes >= report.bytes_per_block else 0


def _is_heard(view: InstanceView) -> bool:
    return view.report is not None and not view.is_stale


def _free_bytes(view: InstanceView) -> int:
    """What is free there, less the demand of whom it is kept for."""
    report = view.report
    assert report is not None
    num_wanted = 0 if view.reserved_for is None else blocks_for(view.reserved_for.num_tokens, report.tokens_per_block)
    return view.free_bytes() - num_wanted * report.bytes_per_block


def _iterations(view: InstanceView) -> float:
    """F in iterations: minus infinity for a terminating instance."""
    report = view.report
    assert report is not None
    if view.is_terminating:
        return -inf
    return _free_bytes(view) / max(1, view.num_running) / report.bytes_per_block * report.tokens_per_block
