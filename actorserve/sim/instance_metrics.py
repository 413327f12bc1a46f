"""What clients do not see: how long requests were interrupted, and how fragmented the free memory is."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from actorserve.core.cluster.state import ClusterState
from actorserve.core.instance.state import InstanceState
from actorserve.core.instance.steps import Step
from actorserve.core.kv.block_allocator import rows_for
from actorserve.core.messages import HandOver, Message, Offer, Peer, Stage, Transfer
from actorserve.core.request import Request
from actorserve.sim.measures.distribution import Distribution


@dataclass(slots=True)
class Gaps:
    """For requests that paused to migrate: the time between the tokens before and after the pause, and the duration of
    the iteration that made the second token. Without the migration the gap would have been that duration.
    """

    gaps_s: Distribution = field(default_factory=Distribution)
    usual_s: Distribution = field(default_factory=Distribution)


class Interruptions:
    """Measures how long requests are interrupted: until the end of the iteration that makes their next token.

    Preemption loss, as in Llumnix, is the time that a request loses by its preemptions: it waits for room, and its KV
    is computed again or copied back. The loss lasts from the preemption to the request's next token, on any instance.
    (This includes the one iteration that the token would have taken anyway.)
    """

    def __init__(self) -> None:
        self.moved = Gaps()
        self._preempted_s: dict[str, float] = {}  # the time of the preemption, by request id
        self._paused_s: dict[str, float] = {}
        self._offered: dict[Transfer, str] = {}  # the request of each transfer
        self._transfers: dict[str, Transfer] = {}  # the newest transfer of each open request

    @property
    def num_followed(self) -> int:
        """Open requests that were preempted, were paused, or began to migrate."""
        return len({*self._preempted_s, *self._paused_s, *self._transfers, *self._offered.values()})

    def on_preemptions(self, instance: InstanceState, now: float) -> list[str]:
        """The instance has preempted requests. Returns the newly preempted ones."""
        found = [
            request.request_id
            for request in instance.requests.values()
            if _is_preempted(request)
            and request not in instance.migration_source.paused
            and request.request_id not in self._preempted_s
        ]
        self._preempted_s |= dict.fromkeys(found, now)
        return found

    def on_send(self, source: Peer, message: Message, now: float) -> None:
        """An instance sends a message, from which on its request may be paused to migrate."""
        match message:
            case Offer(request=request):
                self._forget_transfer(request.request_id)
                transfer = Transfer(source, message.transfer)
                self._offered[transfer] = request.request_id
                self._transfers[request.request_id] = transfer
                if message.is_last:
                    self._paused_s.setdefault(request.request_id, now)
            case Stage(is_last=True) if (transfer := Transfer(source, message.transfer)) in self._offered:
                self._paused_s.setdefault(self._offered[transfer], now)
            case HandOver(request_id=request_id, transfer=None, num_output_tokens=num_output) if num_output:
                self._paused_s.setdefault(request_id, now)

    def on_step(self, step: Step, end_s: float, duration_s: float) -> list[tuple[str, float]]:
        """An iteration begins. Returns the requests that resume after a preemption, and the time that each lost."""
        caught_up: list[tuple[str, float]] = []
        if not self._preempted_s and not self._paused_s:
            return caught_up
        for (request, _), samples in zip(step.batch.rows, step.samples, strict=True):
            if not samples:
                continue
            request_id = request.request_id
            preempted_s = self._preempted_s.pop(request_id, None)
            paused_s = self._paused_s.pop(request_id, None)
            if preempted_s is not None:
                caught_up.append((request_id, end_s - preempted_s))
            elif paused_s is not None:
                self.moved.gaps_s.add(end_s - paused_s)
                self.moved.usual_s.add(duration_s)
        return caught_up

    def on_lost(self, request_id: str, now: float) -> float:
        """The request's instance died, or the request has ended. Returns the time that preemption cost it."""
        self._forget_transfer(request_id)
        self._paused_s.pop(request_id, None)
        preempted_s = self._preempted_s.pop(request_id, None)
        return 0.0 if preempted_s is None else now - preempted_s

    def _forget_transfer(self, request_id: str) -> None:
        transfer = self._transfers.pop(request_id, None)
        if transfer is not None:
            del self._offered[transfer]


def _is_preempted(request: Request) -> bool:
    """Whether the request ran here, and its KV is gone, on the host, or being copied there. (A new request without
    tokens is not preempted.)
    """
    if not request.is_started:
        return request.has_decoded or request.num_cached_tokens is not None
    return bool(request.host_blocks)


def head_of_line(instance: InstanceState) -> Request | None:
    """The first waiting request, in the order of scheduling."""
    requests, paused = instance.requests, instance.migration_source.paused
    return next(
        (
            request
            for request in chain(instance.batcher.order, requests.values())
            if not request.is_started and request not in paused and requests.get(request.request_id) is request
        ),
        None,
    )


def fragmentation(instances: Sequence[InstanceState], demands: Sequence[int], in_line: Sequence[int] = ()) -> float:
    """The share of the cluster's memory that is free, but unusable only because it is spread over instances.

    As in Llumnix (Figure 12), it is the summed demand, over all memory, of the head-of-line requests without room that
    would fit if all free memory lay on one instance. ``demands``, in blocks, are those of the first waiting request of
    each instance (``unmet_demand``). ``in_line`` are those of the coordinator's queue, which the paper does not have.
    They count if no instance has room for them, and at most one per instance, because each instance would have one
    head of line.
    """
    if not instances:
        return 0.0
    most = max(map(room, instances))
    num_free = sum(instance.memory.device.num_free_blocks for instance in instances)
    num_wanted = 0
    for demand in (*demands, *(wanted for wanted in in_line if wanted > most)):
        if num_wanted + demand <= num_free:
            num_wanted += demand
    return num_wanted / sum(instance.memory.device.num_blocks for instance in instances)


def blocks_in_line(coordinator: object, most: int, tokens_per_block: int) -> list[int]:
    """Blocks that each of the first ``most`` requests in the coordinator's queue needs. None wait without one."""
    if not isinstance(coordinator, ClusterState):
        return []
    waiting = islice(coordinator.waiting.values(), most)
    return [rows_for(request.place.num_tokens, tokens_per_block) for request in waiting]


def unmet_demand(instance: InstanceState) -> int:
    """Blocks that the first waiting request of an instance needs; 0 if the instance has room for it."""
    first = head_of_line(instance)
    demand = 0 if first is None else instance.memory.blocks_wanted(first)
    return demand if demand > room(instance) else 0


def room(instance: InstanceState) -> int:
    """Free blocks for one more request. One block per running request is kept back (``core.scheduling.batching``)."""
    num_running = sum(request.is_resident for request in instance.requests.values())
    return instance.memory.device.num_free_blocks - num_running
