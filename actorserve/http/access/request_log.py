"""One line in the log for each request: who sent it, what it used, how long its parts took, how it ended, where it ran.

Each part of the server notes what it knows in the request's ``Record`` (``http.record``).
"""

import logging
from collections.abc import Callable, Collection
from http import HTTPStatus
from typing import Any, Final

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actorserve import logs
from actorserve.core.messages import NOTHING_SPENT, Energy, total_energy
from actorserve.http.access.request_id import request_id_of
from actorserve.http.access.tracing import Tracing
from actorserve.http.record import Measured, Record, record_of

_log: Final = logging.getLogger("actorserve.requests")
_MAX_PATH_CHARS: Final = 200
_QUIET_ROUTES: Final = ("/health", "/ready", "/ping", "/metrics", "/dashboard", "/dashboard/{file}")
"""Programs read these every few seconds. Their lines are debug lines, unless something is wrong."""


class RequestLog:
    """ASGI middleware: logs a line when a request has ended, and has ``tracing`` make its spans. ``clock`` gives
    seconds that never decrease.
    """

    def __init__(self, app: ASGIApp, clock: Callable[[], float], tracing: Tracing | None = None) -> None:
        self._app = app
        self._clock = clock
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record, began_s = record_of(scope), self._clock()

        async def noting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                content_types = [value for name, value in message.get("headers", ()) if name == b"content-type"]
                record.is_stream = any(value.startswith(b"text/event-stream") for value in content_types)
            elif message["type"] == "http.response.body":
                record.is_complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        finally:
            ended_s = self._clock()
            self._log(scope, record, ended_s - began_s)
            if self._tracing is not None and (route := _route_of(scope)) not in _QUIET_ROUTES:
                self._tracing.ended(scope, route, record, began_s, ended_s)

    def _log(self, scope: Scope, record: Record, e2e_s: float) -> None:
        route = _route_of(scope)
        level = _level_of(route, record)
        if _log.isEnabledFor(level):
            values = _values(scope, record) | {"e2e_s": round(e2e_s, 4)}
            _log.log(level, "%s %s", scope["method"][:16], route, extra=logs.fields(**values))


def _route_of(scope: Scope) -> str:
    route: BaseRoute | None = scope.get("route")
    path: str = scope["path"]
    return route.path if isinstance(route, Route) else path[:_MAX_PATH_CHARS]


def _level_of(route: str, record: Record) -> int:
    if record.status is None:
        return logging.INFO  # the client left before it was answered
    if record.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return logging.WARNING
    is_quiet = route in _QUIET_ROUTES and record.status < HTTPStatus.BAD_REQUEST
    return logging.DEBUG if is_quiet else logging.INFO


def _values(scope: Scope, record: Record) -> dict[str, Any]:
    client = scope.get("client")
    values: dict[str, Any] = {
        "request_id": request_id_of(scope),
        "status": record.status,
        "client": f"{client[0]}:{client[1]}" if client else None,
        "key": record.key,
        "error": record.error,
        "error_code": record.error_code,
    }
    if record.choices:
        values |= _of_choices(record.choices) | {"stream": record.is_stream}
    if not record.is_complete:
        values["ended"] = "client left"
    return values


def _of_choices(choices: Collection[Measured]) -> dict[str, Any]:
    """Tokens and joules are summed over the choices. Joules that are not known are left out. Of the times, those of the
    slowest choice are told, and the first TTFT.
    """
    first_tokens_s = [choice.ttft_s for choice in choices if choice.ttft_s is not None]
    workers = dict.fromkeys(worker for choice in choices for worker in choice.workers)
    reasons = dict.fromkeys(choice.reason.value for choice in choices if choice.reason is not None)
    values: dict[str, Any] = {
        "model": next(choice.model for choice in choices),
        "prompt_tokens": sum(choice.num_prompt_tokens for choice in choices),
        "cached_tokens": sum(choice.num_cached_tokens for choice in choices),
        "output_tokens": sum(choice.num_tokens for choice in choices),
        "ended": ",".join(reasons) or None,
        "workers": list(workers) or None,
    }
    if first_tokens_s:
        values |= {
            "queued_s": round(max(choice.queued_s for choice in choices), 4),
            "prefill_s": round(max(choice.prefill_s for choice in choices), 4),
            "decode_s": round(max(choice.decode_s for choice in choices), 4),
            "ttft_s": round(min(first_tokens_s), 4),
        }
    energy: Energy | None = NOTHING_SPENT
    for choice in choices:
        energy = total_energy(energy, choice.energy)
    if energy is not None:
        values |= {"prompt_joules": round(energy.prompt_j, 4), "token_joules": round(energy.token_j, 4)}
    return values
