"""The coordinator's state: the instances, and the requests that wait for one.

Soft: whatever it holds, workers and gateways tell it again after a restart. A request is dispatched at once where some
instance can take it, else it waits here, first come first served, up to a bound and a deadline.
"""

from dataclasses import dataclass, replace
from itertools import islice

from actorserve.core.dispatch import InstanceView, choose_instance
from actorserve.core.effects import Effect, Send
from actorserve.core.messages import (
    LOCAL,
    LoadReport,
    Message,
    Peer,
    PeerDown,
    PeerUp,
    Place,
    RefusalReason,
    Refused,
    Role,
    Tick,
    Unplace,
)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """``placement_ttl_s`` bounds how long a placement counts that no report confirms: its gateway may have died."""

    max_waiting_requests: int
    retry_s: float

    @property
    def placement_ttl_s(self) -> float:
        return 5 * self.retry_s


@dataclass(frozen=True, slots=True)
class _Waiting:
    gateway: Peer
    place: Place


class ClusterState:
    """The pure state machine of the coordinator."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.instances: dict[Peer, InstanceView] = {}
        self.waiting: dict[str, _Waiting] = {}  # by request id, in order of arrival
        self.num_stale_messages = 0

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        """Take one message (local ones have no sender), and return what is to be done, in order."""
        sender = sender or LOCAL
        effects: list[Effect] = []
        match message:
            case Place():
                self._on_place(message, sender, now, effects)
            case LoadReport() if sender in self.instances:
                self.instances[sender].on_report(message)
                self._dispatch_waiting(now, effects)
            case Unplace(request_id=request_id, epoch=epoch):
                self._forget(request_id, epoch)
            case PeerUp(peer=peer, role=Role.WORKER, kind=kind, model=model) if model is not None:
                self.instances[peer] = InstanceView(peer, kind, model)
            case PeerUp():
                pass  # gateways make themselves known by what they ask
            case PeerDown(peer=peer):
                self._on_peer_down(peer)
            case Tick():
                self._expire(now)
            case _:
                self.num_stale_messages += 1
        return effects

    def next_deadline(self) -> float | None:
        """When to send the next Tick, in seconds on the shell's clock."""
        # All placements count equally long: of each instance's the first expires first.
        firsts = (placement for view in self.instances.values() for placement in islice(view.under_way.values(), 1))
        return min((placement.expires_s for placement in firsts), default=None)

    def _on_place(self, place: Place, gateway: Peer, now: float, effects: list[Effect]) -> None:
        for view in self.instances.values():
            known = view.under_way.get(place.request_id)
            if known is not None and known.placed.epoch == place.epoch:
                effects.append(Send(gateway, known.placed))  # asked again: the answer may have been lost
                return
        waiting = self.waiting.get(place.request_id)
        if waiting is not None and waiting.place.epoch == place.epoch:
            # Asked again: it keeps its turn, though what it avoids may have changed.
            waiting = replace(waiting, place=place)
        else:
            self._forget(place.request_id, place.epoch)
            refusal = self._refusal(place)
            if refusal is not None:
                effects.append(Send(gateway, Refused(place.request_id, place.epoch, refusal, self.config.retry_s)))
                return
            waiting = _Waiting(gateway, place)
        self.waiting[place.request_id] = waiting
        # Nothing can overtake: whoever waits already found no instance, and none has changed since.
        self._dispatch(waiting, now, effects)

    def _refusal(self, place: Place) -> RefusalReason | None:
        sizes = [view.model.max_tokens for view in self.instances.values()]
        if sizes and place.num_tokens > max(sizes):
            return RefusalReason.TOO_LARGE
        if len(self.waiting) >= self.config.max_waiting_requests:
            return RefusalReason.OVERLOADED
        return None

    def _dispatch_waiting(self, now: float, effects: list[Effect]) -> None:
        """An instance has reported: give it what it can take, in the order of arrival."""
        for waiting in list(self.waiting.values()):
            self._dispatch(waiting, now, effects)

    def _dispatch(self, waiting: _Waiting, now: float, effects: list[Effect]) -> None:
        """Place a request that waits where it goes best; where it goes nowhere yet, it stays."""
        view = choose_instance(self.instances.values(), waiting.place)
        if view is not None:
            del self.waiting[waiting.place.request_id]
            placed = view.place(waiting.gateway, waiting.place, now + self.config.placement_ttl_s)
            effects.append(Send(waiting.gateway, placed))

    def _on_peer_down(self, peer: Peer) -> None:
        self.instances.pop(peer, None)
        for request_id in [r for r, waiting in self.waiting.items() if waiting.gateway == peer]:
            del self.waiting[request_id]
        for view in self.instances.values():
            for request_id in [r for r, placement in view.under_way.items() if placement.gateway == peer]:
                view.forget(request_id)

    def _expire(self, now: float) -> None:
        for view in self.instances.values():
            for request_id in [r for r, placement in view.under_way.items() if now >= placement.expires_s]:
                view.forget(request_id)

    def _forget(self, request_id: str, epoch: int) -> None:
        """Drop what is held for this request at this or an older epoch."""
        waiting = self.waiting.get(request_id)
        if waiting is not None and waiting.place.epoch <= epoch:
            del self.waiting[request_id]
        for view in self.instances.values():
            placement = view.under_way.get(request_id)
            if placement is not None and placement.placed.epoch <= epoch:
                view.forget(request_id)
