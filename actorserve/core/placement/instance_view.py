"""What the dispatcher knows of one instance: its last load report, and what was sent to it since.

A load report is always a little old. A dispatcher that trusts reports alone sends a whole burst of requests to the
instance that looked free a moment ago. Therefore each view also counts the placements that no report has confirmed
yet: freeness counts them as running requests, and the room counts them as waiting requests.

The next report confirms a placement, but the request may wait there for long. If its demand counted no more, each
report would offer the same memory to further requests. Therefore the room and the freeness for dispatch count the
demand of all requests that wait at the instance.

Incoming migrations and handoffs count in the same way until reports show the memory that is reserved for them. Outgoing
bytes count against the source until they have left, because a source with few requests would otherwise look like the
freest instance and attract new requests.
"""

from dataclasses import dataclass, field
from math import inf

from actorserve.core.messages import Cordon, InstanceRole, LoadReport, ModelInfo, Peer, Place, Placed
from actorserve.core.placement.freeness import freeness

NO_ROOM = -1


@dataclass(frozen=True, slots=True)
class PlacementInFlight:
    """A placement that no load report has confirmed yet. Its ``num_tokens`` to prefill take ``num_blocks``."""

    gateway: Peer
    placed: Placed
    num_tokens: int
    num_blocks: int
    expires_s: float


@dataclass(frozen=True, slots=True)
class NewInstance:
    """An instance that is up and has not reported its load yet. Nothing is sent to it."""

    peer: Peer
    kind: str
    model: ModelInfo


@dataclass(slots=True)
class InstanceView:
    """An instance that has reported its load at least once.

    ``cordon_ordered`` and ``role_ordered`` are what an operator ordered, until a report shows it. An instance that
    ``is_drafted`` works in the mixed pool, whatever its role (``core.pools.cluster_scheduler``). ``num_handoff_blocks``
    are reserved for the ``num_handoffs`` requests that prompt instances are to hand over to it. An instance that is
    ``told_to_come_back`` terminates, too, and is then started again.

    While it is ``reserved_for`` a waiting request, no other request is placed there. ``promised_bytes`` of KV are on
    their way to it by migration: the sources have not reported these bytes as handed over. ``score`` is what dispatch
    compares it by, and ``admitted_tokens`` the longest request that it admits; the fleet keeps both up to date.
    """

    peer: Peer
    kind: str
    model: ModelInfo
    report: LoadReport
    in_flight: dict[str, PlacementInFlight] = field(default_factory=dict)  # by request id, in the order of placement
    num_blocks_in_flight: int = 0
    num_tokens_in_flight: int = 0
    reserved_for: Place | None = None
    promised_bytes: int = 0
    told_to_drain: bool = False
    told_to_come_back: bool = False
    cordon_ordered: Cordon | None = None
    role_ordered: InstanceRole | None = None
    is_drafted: bool = False
    num_handoffs: int = 0
    num_handoff_blocks: int = 0
    is_stale: bool = False  # no report has come for too long
    last_turn: int = 0  # the number of the last placement that went there, counted over the fleet
    score: float = -inf
    admitted_tokens: int = NO_ROOM

    @property
    def is_terminating(self) -> bool:
        return self.told_to_drain or self.report.draining

    @property
    def cordon(self) -> Cordon:
        """What an operator ordered of it last."""
        return self.report.cordon if self.cordon_ordered is None else self.cordon_ordered

    @property
    def role(self) -> InstanceRole:
        """What it is configured as, or an operator ordered it to be."""
        return self.report.role if self.role_ordered is None else self.role_ordered

    @property
    def pool(self) -> InstanceRole:
        """The pool that it works in."""
        return InstanceRole.MIXED if self.is_drafted else self.role

    @property
    def pending_tokens(self) -> int:
        """What is left of the prompts here, including placements in flight."""
        return self.report.pending_prompt_tokens + self.num_tokens_in_flight

    @property
    def is_closed(self) -> bool:
        """Whether it must not get requests: it is terminating, or an operator said so."""
        return self.is_terminating or self.cordon is not Cordon.OPEN

    @property
    def must_empty(self) -> bool:
        """Whether its requests are to move away: it is terminating, or an operator said so."""
        return self.is_terminating or self.cordon is Cordon.EMPTYING

    @property
    def is_healthy(self) -> bool:
        """Whether requests may be sent there: it reports, and it is not closed."""
        return not self.is_stale and not self.is_closed

    @property
    def handoff_bytes(self) -> int:
        """The bytes of the handoffs in flight, whether or not the last report shows them as reserved."""
        return self.num_handoff_blocks * self.report.bytes_per_block

    @property
    def incoming_bytes(self) -> int:
        """The bytes of incoming migrations that the last report does not show as reserved yet. What it shows counts as
        reserved for handoffs first, because the report does not tell the two apart.
        """
        return max(0, self.promised_bytes - max(0, self.report.kv_reserved_bytes - self.handoff_bytes))

    @property
    def coming_bytes(self) -> int:
        """The bytes of incoming migrations and of handoffs in flight that the last report does not show yet."""
        return max(0, self.promised_bytes + self.handoff_bytes - self.report.kv_reserved_bytes)

    @property
    def num_running(self) -> int:
        """B: the running requests, and the placements and handoffs in flight."""
        return len(self.in_flight) + self.num_handoffs + self.report.num_running

    @property
    def pool_tokens(self) -> int:
        """How many tokens of one request fit into the whole blocks of the device memory that is usable now."""
        report = self.report
        return report.row_shape.max_rows(report.kv_total_bytes // report.bytes_per_block) * report.tokens_per_block

    @property
    def capacity_tokens(self) -> int:
        """The longest request that an empty instance could hold now; ``NO_ROOM`` if it is closed."""
        return NO_ROOM if self.is_closed else min(self.model.max_tokens, self.pool_tokens)

    def can_hold(self, place: Place) -> bool:
        """Whether the request could ever run there, however busy the instance is now."""
        return place.num_tokens <= self.capacity_tokens and self.peer != place.avoid

    def room_tokens(self, max_queue: int | None) -> int:
        """The longest request that the instance has room for; ``NO_ROOM`` if ``max_queue`` requests wait there already
        (None: any number may wait).

        There is room for a request if its blocks fit in addition to the KV of all started requests and the demand of
        all waiting ones, in device and host memory together. Preempted requests that yield do not count, because
        otherwise a new request would wait for the end of long ones as soon as the host is full.

        On a token instance only KV counts that is there or is about to come, because the other requests that are to be
        handed over to it wait for their prompts, and those that decode there now leave meanwhile. It has no queue.
        """
        report, coming_bytes = self.report, self.coming_bytes
        if self.pool is InstanceRole.TOKEN:
            max_queue, coming_bytes = None, self.incoming_bytes
        if self.is_stale or (max_queue is not None and report.num_waiting + len(self.in_flight) >= max_queue):
            return NO_ROOM
        demand_bytes = report.kv_needed_bytes + report.kv_wanted_bytes - report.kv_yielding_bytes + coming_bytes
        free_bytes = report.kv_total_bytes + report.host_total_bytes - demand_bytes
        num_free_blocks = free_bytes // report.bytes_per_block - self.num_blocks_in_flight
        max_tokens = report.row_shape.max_rows(max(0, num_free_blocks)) * report.tokens_per_block
        return min(self.capacity_tokens, max_tokens)

    def free_bytes(self) -> int:
        """M less the sum of V, where V includes placements and handoffs in flight, and incoming migrations."""
        report = self.report
        in_flight_bytes = self.num_blocks_in_flight * report.bytes_per_block
        return report.kv_total_bytes - report.virtual_usage_bytes - self.coming_bytes - in_flight_bytes

    def dispatch_freeness(self, num_saved_tokens: int = 0) -> float:
        """F as dispatch compares it, for a request whose first ``num_saved_tokens`` tokens have their KV there already.

        It deviates from Algorithm 1, which counts a waiting request only if it is the head of the line, and only by its
        demand. Here every waiting request counts like a placement in flight: by its demand, and as a running request.
        So does every token that is still to be computed before a request has its next token, as in a queue by Splitwise
        (``core.placement.shortest_queue``), because a new prompt waits for the prompts before it, which their memory
        does not tell. What the instance saves of the new prompt makes up for as many of them.
        A lack of memory is not divided among the requests, because a new request waits until all of it is made up for.
        """
        report = self.report
        free_bytes = self.free_bytes() - (report.kv_wanted_bytes - report.kv_head_bytes)
        if num_saved_tokens:
            num_blocks = num_saved_tokens // report.tokens_per_block * report.row_shape.blocks_per_row
            free_bytes += num_blocks * report.bytes_per_block
        num_fed = self.num_running + report.num_waiting + max(0, self.pending_tokens - num_saved_tokens)
        return freeness(free_bytes, 0, num_fed if free_bytes > 0 else 1, terminating=self.is_closed)

    def add_placement(self, placement: PlacementInFlight) -> None:
        self.in_flight[placement.placed.request_id] = placement
        self.num_tokens_in_flight += placement.num_tokens
        self.num_blocks_in_flight += placement.num_blocks

    def drop_placement(self, request_id: str) -> None:
        placement = self.in_flight.pop(request_id)
        self.num_tokens_in_flight -= placement.num_tokens
        self.num_blocks_in_flight -= placement.num_blocks
