"""The gateway's sessions as the HTTP face's service: requests in, effects of the core out."""

import asyncio
from collections.abc import Callable, Mapping

from actorserve.core.effects import Available, Deliver, Effect, End
from actorserve.core.gateway.state import GatewayState
from actorserve.core.messages import (
    Close,
    FinishReason,
    LoadReport,
    Message,
    ModelInfo,
    Open,
    RefusalReason,
    RequestSpec,
)
from actorserve.http.stream import AnswerStream

_RETRY_AFTER_S = 1.0


class SessionService:
    """Joins the pure sessions and the HTTP face (``service.Service``).

    ``inject`` gives the gateway's actor a local message, and the actor performs effects on clients with ``perform``.
    """

    def __init__(self, core: GatewayState, max_open_requests: int) -> None:
        self._core = core
        self.available = asyncio.Event()
        self._max_open_requests = max_open_requests
        self._streams: dict[str, AnswerStream] = {}  # of open requests, by request id
        self._model: ModelInfo | None = None
        self._inject: Callable[[Message], None] | None = None
        self._num_dropped_frames: Callable[[], int] = lambda: 0
        self._gave_up = False
        self.num_given_up = 0

    def attach(self, inject: Callable[[Message], None], num_dropped_frames: Callable[[], int]) -> None:
        """Connect to the actor that runs the sessions."""
        self._inject = inject
        self._num_dropped_frames = num_dropped_frames

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
                raise TypeError(f"no effect of sessions on clients: {effect}")

    # --- service.Service ---------------------------------------------------------------------------------------------

    @property
    def model(self) -> ModelInfo | None:
        up = [worker.model for worker in self._core.peers.workers.values()]
        if up:
            # A request that only the largest worker can hold is worth placing. Name and vocabulary are the same in all.
            self._model = max(up, key=lambda model: model.max_tokens)
        return self._model

    @property
    def num_instances(self) -> int:
        return len(self._core.peers.workers)

    def submit(self, request: RequestSpec, stream: AnswerStream) -> None:
        if self._gave_up:
            self.num_given_up += 1
            stream.put(_refused(request.request_id, RefusalReason.DRAINING))
        elif len(self._streams) >= self._max_open_requests:
            stream.put(_refused(request.request_id, RefusalReason.OVERLOADED))
        else:
            self._streams[request.request_id] = stream
            self._tell(Open(request))

    def release(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._tell(Close(request_id))

    def loads(self) -> Mapping[str, LoadReport]:
        return {peer.name: report for peer, report in self._core.peers.loads.items()}

    def counters(self) -> Mapping[str, int]:
        counts = self._core.counts
        return {
            "dropped_frames": self._num_dropped_frames(),
            "failovers": counts.num_failovers,
            "handed_over": counts.num_handed_over,
            "placed_without_coordinator": counts.num_placed_by_fallback,
            "stale_messages": counts.num_stale_messages,
        }

    def give_up(self) -> None:
        """The time to drain is over: end all open requests with an error, and refuse new ones.

        ``num_given_up`` counts both.
        """
        self._gave_up = True
        self.num_given_up += len(self._streams)
        for request_id, stream in list(self._streams.items()):
            stream.put(_refused(request_id, RefusalReason.DRAINING))
            self.release(request_id)

    def _tell(self, message: Message) -> None:
        if self._inject is None:
            raise RuntimeError("the service is not attached to an actor")
        self._inject(message)


def _refused(request_id: str, reason: RefusalReason) -> End:
    return End(request_id, FinishReason.ERROR, reason, _RETRY_AFTER_S)
