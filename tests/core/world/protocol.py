"""Rules of the protocol between processes, as the messages' docstrings state them: each watches every event of a world.

A client cannot see whether they hold, because epochs, retries and deadlines make up for one broken rule at a time.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from actorserve.core.cluster.state import ClusterState
from actorserve.core.effects import Effect, RunStep, Send
from actorserve.core.gateway.session import Session
from actorserve.core.gateway.state import GatewayState
from actorserve.core.instance.state import InstanceState
from actorserve.core.messages import (
    Checkpointed,
    Copied,
    CopyFailed,
    Finished,
    HandOver,
    Keep,
    LoadReport,
    Message,
    Peer,
    PeerDown,
    Place,
    Placed,
    Refused,
    Release,
    Started,
    Tokens,
    Transfer,
    Unplace,
    Withdrawn,
)
from actorserve.core.request import Request
from tests.core.world.parts import Process

React = Callable[[Sequence[Effect]], None]
"""Is called with the effects of the event."""


class Watcher(Protocol):
    """Sees every event of a world."""

    def watch(self, process: Process, message: Message, sender: Peer | None) -> React | None:
        """``process`` is about to get this message. Returns what to call afterwards, if anything.

        Raises: AssertionError, there or here, if a rule is broken.
        """
        ...


class StaleMessages:
    """A gateway drops what concerns another epoch than the current one, or comes from another worker than its owner,
    and tells the sender to forget the request.
    """

    def watch(self, process: Process, message: Message, sender: Peer | None) -> React | None:
        gateway = process.core
        if not isinstance(gateway, GatewayState) or sender is None:
            return None
        match message:
            case Tokens(request_ids=request_ids, epochs=epochs):
                named = zip(request_ids, epochs, strict=True)
            case Finished() | Started() | HandOver() | Checkpointed() | Placed():
                named = zip((message.request_id,), (message.epoch,), strict=True)
            case Refused() if sender in gateway.peers.workers:
                named = zip((message.request_id,), (message.epoch,), strict=True)
            case _:
                return None
        is_placed = isinstance(message, Placed)
        stale = [
            (request_id, epoch, _state(session))
            for request_id, epoch in named
            if (session := gateway.sessions.get(request_id)) is None
            or session.epoch != epoch
            or (session.instance != sender and not is_placed)
        ]
        if not stale:
            return None

        def react(effects: Sequence[Effect]) -> None:
            for request_id, epoch, before in stale:
                assert _state(gateway.sessions.get(request_id)) == before, f"{request_id}: a stale message changed it"
                answer = Unplace(request_id, epoch) if is_placed else Release(request_id, epoch)
                assert Send(sender, answer) in effects, f"{request_id}: the sender of a stale message was not told"

        return react


def _state(session: Session | None) -> tuple[object, ...] | None:
    if session is None:
        return None
    return (
        session.epoch,
        session.stage,
        session.instance,
        len(session.output),
        session.transfer,
        session.hand_over,
        session.checkpointed,
    )


class StandingRequests:
    """A request stands still from its HandOver until the gateway says Keep, or the request is gone."""

    def __init__(self) -> None:
        self._standing: dict[Peer, dict[str, Request]] = {}  # by worker and request id

    def watch(self, process: Process, message: Message, sender: Peer | None) -> React | None:
        worker = process.core
        if not isinstance(worker, InstanceState):
            return None
        standing = self._standing.setdefault(process.peer, {})
        for request_id in [name for name, request in standing.items() if worker.requests.get(name) is not request]:
            del standing[request_id]
        if isinstance(message, Keep):
            request = standing.get(message.request_id)
            if request is not None and request.epoch == message.epoch:
                del standing[message.request_id]

        def react(effects: Sequence[Effect]) -> None:
            for effect in effects:
                match effect:
                    case Send(message=HandOver(request_id=request_id)):
                        standing[request_id] = worker.requests[request_id]
                    case RunStep(plan=plan):
                        for request_id in standing.keys() & set(plan.request_ids):
                            is_same = worker.requests[request_id] is standing[request_id]
                            assert not is_same, f"{request_id} runs, and is being handed over"

        return react


class Transfers:
    """A source asks for a hand-over with KV only when all of the KV is copied. A destination gives KV up at once if its
    source withdraws it, a copy fails, or its gateway dies. If the source dies, only complete KV stays. A holder drops a
    dead gateway's checkpoints. The answer about an older read of checkpoints confirms nothing.
    """

    def __init__(self) -> None:
        self._workers: dict[Peer, InstanceState] = {}

    def watch(self, process: Process, message: Message, sender: Peer | None) -> React | None:
        worker = process.core
        if not isinstance(worker, InstanceState):
            return None
        self._workers[process.peer] = worker
        incoming, stored = worker.migration_destination._incoming, worker.checkpoint_store._stored
        given_up: list[Transfer] = []
        checkpoints = worker.checkpoint_source._checkpoints
        reading: dict[str, int] = {}  # by request id: the confirmed rows, if the message is about an older read
        match message:
            case Withdrawn() if sender is not None:
                given_up = [Transfer(sender, message.transfer)]
            case PeerDown(peer=peer):
                given_up = [
                    transfer
                    for transfer, found in incoming.items()
                    if found.gateway == peer
                    or (transfer.source == peer and (not found.is_last or found.kv.copy_id is not None))
                ]
            case CopyFailed(copy_id=copy_id):
                given_up = [transfer for transfer, found in incoming.items() if found.kv.copy_id == copy_id]
            case Copied(transfer=transfer_id, stage=stage):
                reading = {
                    request_id: found.num_confirmed
                    for request_id, found in checkpoints.items()
                    if found.id == transfer_id and found.stage > stage
                }

        def react(effects: Sequence[Effect]) -> None:
            assert not any(transfer in incoming for transfer in given_up), "KV stays that was given up"
            if isinstance(message, PeerDown):
                is_left = any(found.gateway == message.peer for found in stored.values())
                assert not is_left, "checkpoints stay whose gateway is dead"
            for request_id, num_confirmed in reading.items():
                is_same = request_id not in checkpoints or checkpoints[request_id].num_confirmed == num_confirmed
                assert is_same, f"{request_id}: the answer about an older read confirms a newer one"
            for effect in effects:
                match effect:
                    case Send(message=HandOver(to=to, transfer=transfer)) if (
                        transfer is not None and to in self._workers
                    ):
                        found = self._workers[to].migration_destination._incoming.get(Transfer(process.peer, transfer))
                        is_copied = found is None or (found.is_last and found.kv.copy_id is None)
                        assert is_copied, "a hand-over names KV that is still being copied"

        return react


class CoordinatorPromises:
    """A reserved instance gets no other request, a report confirms only what was sent there, and older messages than
    those known change nothing.
    """

    def watch(self, process: Process, message: Message, sender: Peer | None) -> React | None:
        cluster = process.core
        if not isinstance(cluster, ClusterState):
            return None
        views = cluster.fleet.views
        reserved = _reserved(cluster)
        repeated = (message.request_id, message.epoch) if isinstance(message, Place) else None

        placed = [(view.peer, request_id) for view in views.values() for request_id in view.in_flight]

        def react(effects: Sequence[Effect]) -> None:
            if isinstance(message, LoadReport):
                lost = [name for peer, name in placed if peer != sender and cluster.fleet.placement(name) is None]
                assert not lost, f"a report confirms {lost}, which were sent elsewhere"
            for effect in effects:
                match effect:
                    case Send(message=Placed(request_id=request_id, epoch=epoch, instance=instance)):
                        is_kept = instance in reserved and _reserved(cluster).get(instance) == reserved[instance]
                        assert not is_kept or (request_id, epoch) == repeated, f"{instance.name} is reserved"

        match message:
            case Place(request_id=request_id, epoch=epoch) | Unplace(request_id=request_id, epoch=epoch):
                known_epoch = _known_epoch(cluster, request_id)
                if epoch < known_epoch:
                    return lambda effects: _assert_known(cluster, request_id, known_epoch)
            case LoadReport() if sender is not None and sender in views:
                report = views[sender].report
                if message.sequence <= report.sequence:
                    return lambda effects: _assert_reported(cluster, sender, report)
        return react


def _reserved(cluster: ClusterState) -> dict[Peer, str]:
    """The ids of the requests that instances are reserved for."""
    views = cluster.fleet.views
    return {peer: view.reserved_for.request_id for peer, view in views.items() if view.reserved_for is not None}


def _assert_known(cluster: ClusterState, request_id: str, epoch: int) -> None:
    assert _known_epoch(cluster, request_id) == epoch, f"{request_id}: a stale message changed its placement"


def _assert_reported(cluster: ClusterState, worker: Peer, report: LoadReport) -> None:
    assert cluster.fleet.views[worker].report is report, f"{worker.name}: an older report replaced a newer one"


def _known_epoch(cluster: ClusterState, request_id: str) -> int:
    """The newest epoch of the request that the coordinator knows; 0 if none."""
    placement, waiting = cluster.fleet.placement(request_id), cluster.waiting.get(request_id)
    return max(placement.placed.epoch if placement else 0, waiting.place.epoch if waiting else 0)


def protocol_rules() -> list[Watcher]:
    """All rules, for a new world."""
    return [StaleMessages(), StandingRequests(), Transfers(), CoordinatorPromises()]
