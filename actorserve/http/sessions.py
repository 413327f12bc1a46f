"""The gateway's sessions as the HTTP face's service: requests in, streams of tokens out."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

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
from actorserve.http.service import Ended, Produced

_RETRY_AFTER_S = 1.0
_DRAINED = Ended(FinishReason.ERROR, RefusalReason.DRAINING, _RETRY_AFTER_S)


class SessionStream:
    """One request's stream (``service.TokenStream``)."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._items: asyncio.Queue[Produced | Ended] = asyncio.Queue()
        self._release = release

    def put(self, item: Produced | Ended) -> None:
        """Never blocks; what waits is bounded by the request's own length."""
        self._items.put_nowait(item)

    async def __aiter__(self) -> AsyncIterator[Produced | Ended]:
        while True:
            item = await self._items.get()
            yield item
            if isinstance(item, Ended):
                return

    def release(self) -> None:
        self._release()


class SessionService:
    """Joins the pure sessions and the HTTP face (``service.Service``).

    ``inject`` tells the sessions' node something local; the node's ``perform`` is this object's.
    """

    def __init__(self, core: GatewayState, max_open_requests: int) -> None:
        self._core = core
        self.available = asyncio.Event()
        self._max_open_requests = max_open_requests
        self._streams: dict[str, SessionStream] = {}
        self._model: ModelInfo | None = None
        self._inject: Callable[[Message], None] | None = None
        self._num_dropped_frames: Callable[[], int] = lambda: 0
        self._gave_up = False
        self.num_given_up = 0

    def attach(self, inject: Callable[[Message], None], num_dropped_frames: Callable[[], int]) -> None:
        """Connect to the node that runs the sessions."""
        self._inject = inject
        self._num_dropped_frames = num_dropped_frames

    def perform(self, effect: Effect) -> None:
        """Do what the sessions want done for clients."""
        match effect:
            case Deliver(request_id=request_id):
                if request_id in self._streams:
                    produced = Produced(effect.token_ids, effect.logprobs, effect.num_cached_tokens)
                    self._streams[request_id].put(produced)
            case End(request_id=request_id):
                stream = self._streams.pop(request_id, None)
                if stream is not None:
                    stream.put(Ended(effect.reason, effect.refusal, effect.retry_after_s))
            case Available():
                self.available.set()
            case _:
                raise TypeError(f"sessions deliver and end, and asked for {effect}")

    # --- service.Service ---------------------------------------------------------------------------------------------

    @property
    def model(self) -> ModelInfo | None:
        up = [worker.model for worker in self._core.peers.workers.values() if worker.model is not None]
        if up:
            # What any of them can hold is worth placing; the name and vocabulary are the same everywhere.
            self._model = max(up, key=lambda model: model.max_tokens)
        return self._model

    @property
    def num_instances(self) -> int:
        return len(self._core.peers.workers)

    def submit(self, request: RequestSpec) -> SessionStream:
        stream = SessionStream(lambda: self._close(request.request_id))
        if self._gave_up:
            self.num_given_up += 1
            stream.put(_DRAINED)
            return stream
        if len(self._streams) >= self._max_open_requests:
            stream.put(Ended(FinishReason.ERROR, RefusalReason.OVERLOADED, _RETRY_AFTER_S))
            return stream
        self._streams[request.request_id] = stream
        self._tell(Open(request))
        return stream

    def loads(self) -> Mapping[str, LoadReport]:
        return {peer.name: report for peer, report in self._core.peers.loads.items()}

    def counters(self) -> Mapping[str, int]:
        return {
            "dropped_frames": self._num_dropped_frames(),
            "failovers": self._core.counts.num_failovers,
            "handed_over": self._core.counts.num_handed_over,
            "placed_without_coordinator": self._core.counts.num_placed_by_fallback,
            "stale_messages": self._core.counts.num_stale_messages,
        }

    def give_up(self) -> None:
        """The time to drain is over: what still runs ends with an error, and so does what comes.

        ``num_given_up`` counts them.
        """
        self._gave_up = True
        self.num_given_up += len(self._streams)
        for request_id in list(self._streams):
            self._streams[request_id].put(_DRAINED)
            self._close(request_id)

    def _close(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._tell(Close(request_id))

    def _tell(self, message: Message) -> None:
        if self._inject is None:
            raise RuntimeError("the service is not attached to a node")
        self._inject(message)
