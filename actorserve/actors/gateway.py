"""The gateway actor: it owns the clients' streams, which outlive workers, migrations and the coordinator."""

import asyncio
from collections.abc import Mapping
from typing import Final, Protocol

from actorserve.actors.cluster_actor import ClusterActor
from actorserve.actors.node import Node
from actorserve.core.effects import Available, Deliver, Effect, End
from actorserve.core.gateway.shown import Shown
from actorserve.core.gateway.state import GatewayState
from actorserve.core.messages import Close, FinishReason, LoadReport, ModelInfo, Open, RefusalReason, RequestSpec

_RETRY_AFTER_S: Final = 1.0


class Stream(Protocol):
    """The queue of an answer, from which its client is served (``http.stream``)."""

    def put(self, effect: Deliver | End) -> None:
        """Append tokens or the end of one of the answer's requests. Never blocks."""
        ...


class GatewayActor(ClusterActor):
    """Runs the sessions (``GatewayState``) and hands what they deliver to the clients' streams.

    It is the service behind the HTTP API (``http.service.Service``). ``available`` is set when the first worker is up.
    """

    _core: GatewayState

    def __init__(self, core: GatewayState, node: Node, max_open_requests: int) -> None:
        super().__init__(core, node)
        self.available = asyncio.Event()
        self._max_open_requests = max_open_requests
        self._streams: dict[str, Stream] = {}  # of open requests, by request id
        self._model: ModelInfo | None = None
        self._gave_up = False
        self.num_given_up = 0

    def perform(self, effect: Effect) -> None:
        """Perform an effect of the sessions that concerns clients. Effects of a released request are dropped."""
        match effect:
            case Deliver(request_id=request_id):
                if (stream := self._streams.get(request_id)) is not None:
                    stream.put(effect)
            case End(request_id=request_id):
                if (stream := self._streams.pop(request_id, None)) is not None:
                    stream.put(effect)
            case Available():
                self.available.set()
            case _:
                super().perform(effect)

    def give_up(self) -> None:
        """The time to drain is over: end all open requests with an error, and refuse new ones.

        ``num_given_up`` counts both.
        """
        self._gave_up = True
        self.num_given_up += len(self._streams)
        for request_id, stream in list(self._streams.items()):
            stream.put(_refused(request_id, RefusalReason.DRAINING))
            self.release(request_id)

    # --- http.service.Service ----------------------------------------------------------------------------------------

    @property
    def model(self) -> ModelInfo | None:
        up = [worker.model for worker in self._core.peers.workers.values()]
        if up:
            # Workers differ only in capacity. A request that only the largest worker can hold is still accepted.
            self._model = max(up, key=lambda model: model.max_tokens)
        return self._model

    @property
    def num_instances(self) -> int:
        return len(self._core.peers.workers)

    def submit(self, request: RequestSpec, stream: Stream) -> None:
        if self._gave_up:
            self.num_given_up += 1
            stream.put(_refused(request.request_id, RefusalReason.DRAINING))
        elif len(self._streams) >= self._max_open_requests:
            stream.put(_refused(request.request_id, RefusalReason.OVERLOADED))
        else:
            self._streams[request.request_id] = stream
            self.tell(Open(request))

    def release(self, request_id: str, *, is_complete: bool = False) -> None:
        if self._streams.pop(request_id, None) is not None:
            self.tell(Close(request_id, is_complete))

    @property
    def num_unplaced(self) -> int:
        return self._core.num_unplaced

    @property
    def coordinator_term(self) -> int:
        peers = self._core.peers
        return 0 if peers.coordinator is None else peers.term

    def shown_loads(self) -> Mapping[str, LoadReport]:
        peers = self._core.peers
        return {peer.name: report for peer, report in peers.loads.items()} if peers.shown_on == self.me.host else {}

    def shown(self, most_requests: int) -> Shown:
        return self._core.shown(self._clock(), most_requests)

    def counters(self) -> Mapping[str, int]:
        counts = self._core.counts
        return {
            "dropped_frames": self.num_dropped_frames(),
            "coordinator_takeovers": counts.num_takeovers,
            "failovers": counts.num_failovers,
            "handed_over": counts.num_handed_over,
            "placed_without_coordinator": counts.num_placed_by_fallback,
            "stale_messages": counts.num_stale_messages,
        }


def _refused(request_id: str, reason: RefusalReason) -> End:
    return End(request_id, FinishReason.ERROR, reason, _RETRY_AFTER_S)
