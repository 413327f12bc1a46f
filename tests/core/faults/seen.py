"""What happened in the histories, so that a test can tell whether the rare events still happen."""

from collections import Counter
from collections.abc import Sequence

from actorserve.core.cluster.state import ClusterState
from actorserve.core.effects import Effect, End, RunStep, Send, StartWorker
from actorserve.core.gateway.state import GatewayState
from actorserve.core.instance.state import InstanceState
from actorserve.core.messages import (
    Copied,
    CopyFailed,
    Drain,
    Keep,
    Message,
    MigrateTo,
    Peer,
    Placed,
    Release,
    SetRole,
    Start,
    TransferKind,
    Withdrawn,
)
from actorserve.core.migration.outgoing import Phase
from tests.core.world.parts import Process
from tests.core.world.protocol import React


class Seen:
    """Counts events of all worlds that it watches."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._path: dict[str, list[str]] = {}  # of each request in this world: the workers that it has moved to with KV

    def begin(self) -> None:
        """A new world begins."""
        self.counts["histories"] += 1
        self._path = {}

    def watch(self, process: Process, message: Message, sender: Peer | None) -> React | None:
        match process.core:
            case InstanceState() as worker:
                return self._watch_worker(process, worker, message, sender)
            case GatewayState():
                return self._watch_gateway
            case ClusterState() as cluster:
                return lambda effects: self._watch_coordinator(cluster, effects)

    # --- workers -----------------------------------------------------------------------------------------------------

    def _watch_worker(
        self, process: Process, worker: InstanceState, message: Message, sender: Peer | None
    ) -> React | None:
        match message:
            case Start(transfer=transfer) if transfer is not None:
                return lambda effects: self._on_start(process, worker, message)
            case CopyFailed(copy_id=copy_id):
                holdings = worker.migration_destination.holdings, worker.checkpoint_store.holdings
                for kind, found in zip(TransferKind, holdings, strict=True):
                    self.counts[f"copy of a {kind} failed"] += any(kv.copy_id == copy_id for kv in found)
            case Copied(transfer=transfer_id) if transfer_id.kind is TransferKind.CHECKPOINT:
                return self._watch_checkpoint(worker, message)
        moving = {outgoing.id for outgoing in worker.migration_source._outgoing.values()}
        handoffs = {
            outgoing.id: outgoing.stage
            for outgoing in worker.migration_source._outgoing.values()
            if outgoing.is_handoff
        }

        def react(effects: Sequence[Effect]) -> None:
            still = {outgoing.id for outgoing in worker.migration_source._outgoing.values()}
            for transfer_id in handoffs.keys() - still:
                how = "handed off" if isinstance(message, Release) else "handoff ended early"
                self.counts[how] += 1
                self.counts["handed off while the prompt ran"] += how == "handed off" and handoffs[transfer_id] > 1
            self.counts["copied before its iteration ended"] += isinstance(message, Copied) and any(
                outgoing.phase is Phase.ALL_COPIED and outgoing.id == message.transfer
                for outgoing in worker.migration_source._outgoing.values()
            )
            for effect in effects:
                match effect:
                    case Send(message=Withdrawn(transfer=transfer_id)) if transfer_id in moving - still:
                        self.counts[f"move withdrawn at {type(message).__name__}"] += 1
                    case RunStep(plan=plan) if len({worker.requests[r].spec.priority for r in plan.request_ids}) > 1:
                        self.counts["step with several priorities"] += 1

        return react

    def _on_start(self, process: Process, worker: InstanceState, start: Start) -> None:
        """Started with KV: it is computed in part before any step ran, and not from the prefix cache."""
        transfer, request = start.transfer, worker.requests.get(start.request.request_id)
        if transfer is None or request is None or request.epoch != start.epoch:
            return
        is_adopted = request.num_computed > 0 and request.num_cached_tokens == 0
        self.counts[f"{'adopted from' if is_adopted else 'no copy of'} a {transfer.id.kind}"] += 1
        if is_adopted and transfer.id.kind is TransferKind.MIGRATION:
            path = self._path.setdefault(request.request_id, [transfer.source.name])
            if path[-1] != transfer.source.name:
                path[:] = [transfer.source.name]
            path.append(process.peer.name)
            self.counts["moved on to a third worker"] += len(set(path[-3:])) == 3
            self.counts["moved back"] += len(path) > 2 and path[-3] == path[-1]

    def _watch_checkpoint(self, worker: InstanceState, message: Copied) -> React:
        source = worker.checkpoint_source
        asked = [found for found in source._checkpoints.values() if found.asked and found.id == message.transfer]
        is_answer = bool(asked) and asked[0].stage == message.stage

        def react(effects: Sequence[Effect]) -> None:
            if is_answer:
                is_confirmed = asked[0].confirmed_stage == message.stage
                self.counts["checkpoint confirmed" if is_confirmed else "checkpoint voided"] += 1

        return react

    # --- gateways and the coordinator --------------------------------------------------------------------------------

    def _watch_gateway(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(message=Keep()):
                    self.counts["hand-over refused"] += 1
                case End():
                    self.counts["ended"] += 1

    def _watch_coordinator(self, cluster: ClusterState, effects: Sequence[Effect]) -> None:
        self.counts["instance drafted"] += any(view.is_drafted for view in cluster.fleet.views.values())
        self.counts["instance reserved"] += len(cluster.fleet.reserving_ids)
        for effect in effects:
            match effect:
                case Send(message=MigrateTo(num_bytes=num_bytes)) if num_bytes:
                    self.counts["paired by the coordinator"] += 1
                case StartWorker(role=role):
                    self.counts["started for a pool" if role else "started"] += 1
                case Send(message=Drain()):
                    self.counts["ended by scaling"] += 1
                case Send(message=SetRole()):
                    self.counts["newcomer given a role"] += 1
                case Send(message=Placed(waited_s=waited_s)) if waited_s:
                    self.counts["placed after a wait"] += 1
