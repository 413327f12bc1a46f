"""Requests that an instance is done with, until their gateways have heard of it."""

from actorserve.core.effects import Effect, Send
from actorserve.core.messages import Finished, RefusalReason, Refused
from actorserve.core.request import Request


class Outbox(dict[str, Request]):
    """By id: finished, or given back for want of room. Each one's last word is said again and again until its gateway
    releases it.
    """

    def __init__(self, retry_s: float) -> None:
        super().__init__()
        self.next_retry_s: float | None = None
        self._retry_s = retry_s

    def say(self, request: Request, now: float, effects: list[Effect]) -> None:
        """It has ended: tell its gateway."""
        self[request.request_id] = request
        effects.append(self.last_word(request))
        if self.next_retry_s is None:
            self.next_retry_s = now + self._retry_s

    def last_word(self, request: Request) -> Send:
        request_id, epoch, reason = request.request_id, request.epoch, request.finish_reason
        if reason is None:
            refusal = RefusalReason.OVERLOADED
            return Send(request.gateway, Refused(request_id, epoch, refusal, self._retry_s, request.attained))
        return Send(request.gateway, Finished(request_id, epoch, reason, request.num_output))

    def on_tick(self, now: float, effects: list[Effect]) -> None:
        if self.next_retry_s is not None and now >= self.next_retry_s:
            effects.extend(self.last_word(request) for request in self.values())
            self.next_retry_s = now + self._retry_s if self else None
