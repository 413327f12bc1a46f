"""Migration pairing: which instance moves requests to which (Llumnix, section 4.4.3).

In each round instances below one bound of freeness are sources, and instances above another are destinations. The
lowest source is paired with the highest destination of the same kind, so that a request's tokens stay the same. A
source goes on until its freeness is high enough. Its worker chooses the requests (``core.migration.source``); this
module decides only the pairs, and how much may move at most:

- half of the difference between the destination's and the source's free memory, which makes both equal. If a request
  of the source's mean size is larger than that, one such request may move, as long as the destination stays clearly
  freer. Otherwise a source with a few large requests could move none.
- so little that the destination stays above the bound at which a source stops, if the moved requests have the source's
  mean size. So a move never turns its destination into a source.

The capacity of links does not count here. The source knows it best: it weighs a move's gain against its cost by the
measured bandwidth. When a move's time is over, bytes that have not moved no longer count.

Pools (``core.pools``). A request decodes on a prompt instance if no token instance was chosen for it, or none took it,
or if it was there when the instance's role changed. So the instance is a source for these requests, whatever its load,
and for no others. They go to token and mixed instances. A token instance receives only requests past their first token,
except from another token instance, because they would wait there as well. A prompt instance receives nothing, except
from a prompt instance that is to empty: the prompts that wait there, once nothing decodes there any more. An instance
that is drafted into the mixed pool counts as a mixed one.

An instance that terminates, or that an operator empties, is a source whatever its load, for all its requests, and gets
one destination after another. An instance that is closed for either reason, or is cordoned, is no destination. If
an instance is reserved for a request that waits in the cluster, this request counts there as the head of the line. So
the instance becomes a source, and small requests make room for the big one: de-fragmentation, by Llumnix's own rule.
The reserved instance gets its destination before all other sources, it does not rest, and a move that would fill it
ends.

To prevent storms, a source stops at a higher freeness than it starts at and rests afterwards, and a destination does
not become a source for as long. After half of its time, a move whose source has nothing in flight is over, because
nothing there fits into what is left. A pair whose move moved nothing is left alone, twice as long each time. At most
``max_moves`` are in progress at once.

All state is soft: after a restart the first round begins with what the instances report.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Final

from actorserve.core.effects import Send
from actorserve.core.kv.block_allocator import rows_for
from actorserve.core.messages import InstanceRole, MigrateTo, Peer
from actorserve.core.placement.fleet import Fleet
from actorserve.core.placement.instance_view import InstanceView

MAX_BACKOFF_S: Final = 60.0
"""A pair that keeps failing is still tried once in this time."""

PATIENCE: Final = 10
"""After a move's ``ttl_s``, its migrations in flight are waited for, for up to this many times ``ttl_s``."""


@dataclass(frozen=True, slots=True)
class PairingConfig:
    """Bounds of freeness are in iterations: how many tokens each request of the batch can still generate.

    An instance below ``source_below`` sends until it is above ``source_until``; an instance above ``destination_above``
    may receive. A move lasts for ``ttl_s``. For ``rest_s`` a source does not receive and a destination does not send.
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
    """A source's current task: to hand over ``num_bytes`` of KV until ``expires_s``.

    The source has not yet reported ``left_bytes`` of them as handed over. The other counts are what the source had
    reported when the move began.
    """

    source: InstanceView
    destination: InstanceView
    num_bytes: int
    left_bytes: int
    expires_s: float
    migrated_bytes: int
    num_migrated: int
    num_failed: int


@dataclass(frozen=True, slots=True)
class _Backoff:
    until_s: float
    num_failures: int


class Pairing:
    """Decides the moves, and counts the bytes that are on their way in the destinations' views."""

    def __init__(self, config: PairingConfig, fleet: Fleet, *, across_kinds: bool = False) -> None:
        """``across_kinds``: whether requests may move to another kind of instance."""
        self.moves: dict[Peer, Move] = {}  # by source
        self.config = config
        self._fleet = fleet
        self._across_kinds = across_kinds
        self._no_source_until_s: dict[Peer, float] = {}
        self._no_destination_until_s: dict[Peer, float] = {}
        self._backoffs: dict[tuple[Peer, Peer], _Backoff] = {}  # by source and destination

    def set_config(self, config: PairingConfig) -> None:
        """Decide by these bounds from the next round on."""
        self.config = config

    def on_report(self, view: InstanceView) -> None:
        """Stop counting bytes that a source has handed over, because the destination reports them now or soon."""
        move = self.moves.get(view.peer)
        if move is not None and move.source is view and move.left_bytes:
            moved_bytes = view.report.migrated_bytes - move.migrated_bytes
            self._set_left(move, max(0, move.num_bytes - max(0, moved_bytes)))

    def on_down(self, peer: Peer) -> None:
        """End the moves from and to an instance that is gone."""
        for move in list(self.moves.values()):
            if peer in (move.source.peer, move.destination.peer):
                self._end(move)
        self._no_source_until_s.pop(peer, None)
        self._no_destination_until_s.pop(peer, None)
        self._backoffs = {pair: backoff for pair, backoff in self._backoffs.items() if peer not in pair}

    def round(self, now: float) -> list[Send]:
        """Review the current moves and begin new ones. Returns the messages to the sources."""
        self._forget_expired(now)
        sends: list[Send] = []
        for move in list(self.moves.values()):
            self._review(move, now, sends)
        busy = {view.peer for move in self.moves.values() for view in (move.source, move.destination)}
        idle = [view for peer, view in self._fleet.views.items() if peer not in busy and not view.is_stale]
        iterations = {view.peer: _iterations(view) for view in idle}
        sources = [view for view in idle if self._is_source(view, iterations[view.peer])]
        if sources:
            sources.sort(key=lambda view: (view.reserved_for is None, iterations[view.peer], view.peer))
            self._pair(sources, self._destinations(idle, iterations), now, sends)
        return sends

    def validate(self) -> None:
        """Raises: AssertionError if an instance takes part twice, or promised bytes are not those of the moves."""
        views = self._fleet.views
        assert len(self.moves) <= self.config.max_moves, "at most max_moves moves are in progress"
        taking_part = [view.peer for move in self.moves.values() for view in (move.source, move.destination)]
        assert len(set(taking_part)) == len(taking_part), "an instance takes part in one move at most"
        promised_bytes = dict.fromkeys(views, 0)
        for source, move in self.moves.items():
            assert views.get(source) is move.source, f"the source {source.name} is known"
            assert views.get(move.destination.peer) is move.destination, "the destination is known"
            is_allowed = self._across_kinds or move.source.kind == move.destination.kind
            assert is_allowed, "a move stays within a kind"
            assert 0 <= move.left_bytes <= move.num_bytes, "left bytes are part of the move"
            promised_bytes[move.destination.peer] += move.left_bytes
        for peer, view in views.items():
            assert view.promised_bytes == promised_bytes[peer], f"{peer.name} is promised what its move has left"

    # --- current moves -----------------------------------------------------------------------------------------------

    def _review(self, move: Move, now: float, sends: list[Send]) -> None:
        """End a move that is done, expired or pointless, and back off from a pair that moved nothing."""
        source, destination, report = move.source, move.destination, move.source.report
        num_migrated = report.num_migrated - move.num_migrated
        num_failed = report.num_migrations_failed - move.num_failed
        pair = source.peer, destination.peer
        if num_migrated > 0:
            self._backoffs.pop(pair, None)
        is_over = now >= move.expires_s
        is_busy = report.num_migrating > 0 and now < move.expires_s + PATIENCE * self.config.ttl_s
        is_idle = now >= move.expires_s - 0.5 * self.config.ttl_s
        if is_over:
            self._set_left(move, 0)
        has_room = destination.is_healthy and _iterations(destination) >= self.config.source_below
        if source.is_stale or not has_room or destination.reserved_for is not None:
            self._stop(move, now, sends)
        elif _iterations(source) >= self.config.source_until:
            self._stop(move, now, sends)
            self._rest(source.peer, now)
        elif is_busy:
            return  # decide about more once the migrations in flight have ended
        elif num_migrated <= 0 and (is_idle or num_failed > 0):
            self._stop(move, now, sends)
            num_failures = 1 + (self._backoffs[pair].num_failures if pair in self._backoffs else 0)
            backoff_s = min(self.config.rest_s * 2.0 ** min(num_failures - 1, 30), MAX_BACKOFF_S)
            self._backoffs[pair] = _Backoff(now + backoff_s, num_failures)
        elif is_over or not move.left_bytes:
            self._end(move)
        elif is_idle:
            self._stop(move, now, sends)

    def _stop(self, move: Move, now: float, sends: list[Send]) -> None:
        """End a move before its time is over, and tell its source."""
        if now < move.expires_s and move.source.peer in self._fleet.instances:
            sends.append(Send(move.source.peer, MigrateTo(move.destination.peer, 0, 0.0)))
        self._end(move)

    def _end(self, move: Move) -> None:
        self._set_left(move, 0)
        del self.moves[move.source.peer]

    def _set_left(self, move: Move, left_bytes: int) -> None:
        if left_bytes != move.left_bytes:
            self._fleet.promise(move.destination, left_bytes - move.left_bytes)
            move.left_bytes = left_bytes

    def _rest(self, source: Peer, now: float) -> None:
        self._no_source_until_s[source] = self._no_destination_until_s[source] = now + self.config.rest_s

    def _forget_expired(self, now: float) -> None:
        for times in (self._no_source_until_s, self._no_destination_until_s):
            for peer in [peer for peer, until_s in times.items() if until_s <= now]:
                del times[peer]
        for pair in [pair for pair, backoff in self._backoffs.items() if backoff.until_s + MAX_BACKOFF_S <= now]:
            del self._backoffs[pair]

    # --- new pairs ---------------------------------------------------------------------------------------------------

    def _is_source(self, view: InstanceView, iterations: float) -> bool:
        has_requests = view.report.num_running + view.report.num_waiting > 0
        is_urgent = view.must_empty or view.reserved_for is not None
        may_start = is_urgent or view.peer not in self._no_source_until_s
        return has_requests and may_start and iterations < self.config.source_below

    def _destinations(
        self, idle: Iterable[InstanceView], iterations: Mapping[Peer, float]
    ) -> dict[str, list[InstanceView]]:
        """The instances that may receive, by kind, the freest last."""
        found: dict[str, list[InstanceView]] = defaultdict(list)
        for view in idle:
            is_free = not view.is_closed and view.reserved_for is None
            may_receive = is_free and view.peer not in self._no_destination_until_s
            if may_receive and iterations[view.peer] > self.config.destination_above:
                found[self._kind_of(view)].append(view)
        for views in found.values():
            views.sort(key=lambda view: (iterations[view.peer], view.peer))
        return found

    def _kind_of(self, view: InstanceView) -> str:
        """Requests move between instances for which this is equal."""
        return "" if self._across_kinds else view.kind

    def _pair(
        self,
        sources: Sequence[InstanceView],
        destinations: Mapping[str, list[InstanceView]],
        now: float,
        sends: list[Send],
    ) -> None:
        """Give each source the freest destination that it may be paired with."""
        for source in sources:
            if len(self.moves) >= self.config.max_moves:
                return
            left = destinations.get(self._kind_of(source), [])
            destination = next((view for view in reversed(left) if self._may_pair(source, view, now)), None)
            if destination is None:
                continue
            num_bytes = self._bytes_to_move(source, destination)
            if num_bytes > 0:
                left.remove(destination)
                self._begin(source, destination, num_bytes, now, sends)

    def _may_pair(self, source: InstanceView, destination: InstanceView, now: float) -> bool:
        if not _fits_pools(source, destination):
            return False
        backoff = self._backoffs.get((source.peer, destination.peer))
        return backoff is None or backoff.until_s <= now

    def _begin(
        self, source: InstanceView, destination: InstanceView, num_bytes: int, now: float, sends: list[Send]
    ) -> None:
        report, ttl_s = source.report, self.config.ttl_s
        self.moves[source.peer] = move = Move(
            source,
            destination,
            num_bytes,
            left_bytes=0,
            expires_s=now + ttl_s,
            migrated_bytes=report.migrated_bytes,
            num_migrated=report.num_migrated,
            num_failed=report.num_migrations_failed,
        )
        self._set_left(move, num_bytes)
        self._no_source_until_s[destination.peer] = now + ttl_s + self.config.rest_s
        decoding_only = _moves_only_decodes(source, destination)
        sends.append(Send(source.peer, MigrateTo(destination.peer, num_bytes, ttl_s, decoding_only)))

    def _bytes_to_move(self, source: InstanceView, destination: InstanceView) -> int:
        """As much as the module's rules allow; 0 if that is less than a block."""
        report = source.report
        wanted_bytes = report.kv_needed_bytes + report.kv_wanted_bytes
        num_requests = report.num_running + report.num_waiting
        if _moves_only_decodes(source, destination):
            wanted_bytes, num_requests = report.kv_decoding_bytes, report.num_decoding
        free_bytes = destination.free_bytes()
        mean_bytes = max(wanted_bytes / max(1, num_requests), report.bytes_per_block)
        if not source.must_empty and not _sends_decodes(source):
            gap_bytes = free_bytes - _free_bytes(source)
            wanted_bytes = min(wanted_bytes, max(gap_bytes // 2, min(ceil(mean_bytes), gap_bytes * 3 // 4)))
        # (free - x) / (B + x / mean) >= least, solved for x
        to = destination.report
        least_bytes = self.config.source_until * to.bytes_per_block / to.tokens_per_block
        spare_bytes = (free_bytes - least_bytes * max(1, destination.num_running)) / (1.0 + least_bytes / mean_bytes)
        num_bytes = min(wanted_bytes, int(spare_bytes))
        return num_bytes if num_bytes >= report.bytes_per_block else 0


def _free_bytes(view: InstanceView) -> int:
    """What is free there, less the demand of the request that it is reserved for."""
    report = view.report
    num_wanted = 0 if view.reserved_for is None else rows_for(view.reserved_for.num_tokens, report.tokens_per_block)
    return view.free_bytes() - num_wanted * report.bytes_per_block


def _sends_decodes(view: InstanceView) -> bool:
    """Whether the instance is to send away all requests that decode there."""
    return view.pool is InstanceRole.PROMPT and view.report.num_decoding > 0


def _moves_only_decodes(source: InstanceView, destination: InstanceView) -> bool:
    """Whether only requests past their first token move from the one to the other."""
    is_token = destination.pool is InstanceRole.TOKEN and source.pool is not InstanceRole.TOKEN
    return is_token or _sends_decodes(source)


def _fits_pools(source: InstanceView, destination: InstanceView) -> bool:
    """Whether the destination computes the phase of the requests that the source is to send."""
    only_prompts = source.pool is InstanceRole.PROMPT and not source.report.num_decoding
    match destination.pool:
        case InstanceRole.PROMPT:
            return only_prompts
        case InstanceRole.TOKEN:
            return not only_prompts
        case InstanceRole.MIXED:
            return True


def _iterations(view: InstanceView) -> float:
    """F in iterations; minus infinity for an instance that is to send all away, and infinity for a prompt instance
    without such requests, because a long queue of prompts is no lack of memory for decodes.
    """
    if view.must_empty or _sends_decodes(view):
        return -inf
    if view.pool is InstanceRole.PROMPT:
        return inf
    report = view.report
    return _free_bytes(view) / max(1, view.num_running) / report.bytes_per_block * report.tokens_per_block
