"""Requests that ended on this instance, until their gateways release them."""

from actorserve.core.effects import Effects
from actorserve.core.messages import Finished, Message, RefusalReason, Refused
from actorserve.core.request import Request


class Outbox(dict[str, Request]):
    """By id: requests that finished here, or were given back because memory ran short.

    The message that a request has ended is repeated until its gateway releases the request.
    """

    def __init__(self, retry_s: float, effects: Effects) -> None:
        super().__init__()
        self.next_retry_s: float | None = None
        self._retry_s = retry_s
        self._effects = effects

    def add(self, request: Request, now: float) -> None:
        """Tell the gateway that the request has ended."""
        self[request.request_id] = request
        self.send(request)
        if self.next_retry_s is None:
            self.next_retry_s = now + self._retry_s

    def send(self, request: Request) -> None:
        """Tell the gateway, for the first time or again."""
        self._effects.send(request.gateway, self._ending(request))

    def on_tick(self, now: float) -> None:
        if self.next_retry_s is not None and now >= self.next_retry_s:
            for request in self.values():
                self.send(request)
            self.next_retry_s = now + self._retry_s if self else None

    def _ending(self, request: Request) -> Message:
        request_id, epoch, reason = request.request_id, request.epoch, request.finish_reason
        if reason is None:
            return Refused(request_id, epoch, RefusalReason.OVERLOADED, self._retry_s, request.attained, request.energy)
        return Finished(request_id, epoch, reason, request.num_output, request.energy)
