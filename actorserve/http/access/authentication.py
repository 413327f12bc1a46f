"""Which requests are allowed, and with which priority.

All routes except ``/health``, ``/ready``, ``/ping`` and the files of pages need a key, as ``Authorization: Bearer
KEY`` or, from Anthropic's clients, as ``x-api-key: KEY``.

Every wrong or missing key gets the same 401, before anything else of the request is read. A viewer's key makes no
requests (POST), and a user's key may not watch: both get 403.
"""

from collections.abc import Collection, Iterable
from http import HTTPStatus
from typing import NamedTuple, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from actorserve.http.access.api_keys import ApiKey, ApiKeys, KeyRole
from actorserve.http.access.key_limits import KeyLimits
from actorserve.http.access.open_requests import OpenRequests
from actorserve.http.access.request_id import work_name_of
from actorserve.http.errors import RequestFailedError, error_response
from actorserve.http.record import record_of

OPEN_PATHS = ("/health", "/ready", "/ping")
_SCOPE_KEY = "actorserve.api_key"
_RETRY_S = 1.0


class KeyCounts(Protocol):
    """Counts the use of keys (``http.metrics``)."""

    def count_key_request(self, key: str) -> None:
        """A request with this key, which is not beyond a limit."""
        ...

    def count_key_refusal(self, key: str, limit: str) -> None:
        """A request with this key was beyond ``limit``."""
        ...


class Authentication:
    """ASGI middleware: lets requests with a valid key through, and notes the key in the scope.

    A key's requests beyond one of its limits get 429. Those that only read (GET) do not count.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        open_requests: OpenRequests,
        limits: KeyLimits,
        counts: KeyCounts,
        open_paths: Collection[str] = (),
    ) -> None:
        """``open_paths`` need no key either."""
        self._app = app
        self._keys = keys
        self._open = open_requests
        self._limits = limits
        self._counts = counts
        self._open_paths = frozenset((*OPEN_PATHS, *open_paths))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await WebSocketClose()(scope, receive, send)
            return
        # The router uses the same path, which does not depend on the client's Host header.
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            secret = _secret(scope["headers"])
            key = self._keys.find(secret) if secret is not None else None
            if key is None:
                message = "a valid API key is needed, as the header: Authorization: Bearer KEY, or: x-api-key: KEY"
                response = error_response(RequestFailedError(401, message, code="invalid_api_key"), scope)
                response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
            scope[_SCOPE_KEY] = key
            record_of(scope).key = key.name
            if scope["method"] == "POST":
                if key.role is KeyRole.VIEWER:
                    message = "this API key is a viewer's: it may only read"
                    failure = RequestFailedError(HTTPStatus.FORBIDDEN, message, code="key_may_only_read")
                    await error_response(failure, scope)(scope, receive, send)
                    return
                await self._limited(key, scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _limited(self, key: ApiKey, scope: Scope, receive: Receive, send: Send) -> None:
        most = key.max_open_requests
        beyond = self._limits.check(key)
        if beyond is not None:
            what = beyond.limit.removesuffix("_per_minute")
            message = f"this API key may use {beyond.per_minute} {what} a minute on this host; try again later"
            failure = RequestFailedError(429, message, code="rate_limit_exceeded", retry_after_s=beyond.retry_after_s)
            await self._refuse(key, beyond.limit, failure, scope, receive, send)
        elif most is None:
            self._counts.count_key_request(key.name)
            await self._app(scope, receive, send)
        elif not self._open.begin(key.name, most):
            message = f"this API key has its {most} open requests; try again when one of them has ended"
            failure = RequestFailedError(429, message, code="too_many_open_requests", retry_after_s=_RETRY_S)
            await self._refuse(key, "max_open_requests", failure, scope, receive, send)
        else:
            self._counts.count_key_request(key.name)
            try:
                await self._app(scope, receive, send)
            finally:
                self._open.end(key.name)

    async def _refuse(
        self, key: ApiKey, limit: str, failure: RequestFailedError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._counts.count_key_refusal(key.name, limit)
        await error_response(failure, scope)(scope, receive, send)


def _secret(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The secret after ``Bearer``; without that header, the value of ``x-api-key``. None if both headers are missing,
    or if the header is repeated or of another scheme.
    """
    headers = list(headers)
    values = [value for name, value in headers if name == b"authorization"]
    if not values:
        keys = [value for name, value in headers if name == b"x-api-key"]
        return keys[0].strip() if len(keys) == 1 else None
    if len(values) != 1:
        return None
    scheme, _, secret = values[0].strip().partition(b" ")
    return secret.strip() if scheme.lower() == b"bearer" else None


def check_may_watch(scope: Scope) -> None:
    """Without API keys everyone may watch.

    Raises: RequestFailedError, 403, if the request's key is neither a viewer's nor an operator's.
    """
    key = scope.get(_SCOPE_KEY)
    if isinstance(key, ApiKey) and key.role is KeyRole.USER:
        message = "this API key may not watch: its role must be viewer or operator"
        raise RequestFailedError(HTTPStatus.FORBIDDEN, message, code="key_may_not_watch")


class Grant(NamedTuple):
    """What a request gets: by its API key a priority and the key's name, which is empty without API keys, and the name
    of its work.
    """

    priority: int
    client: str
    work_name: str


def granted(scope: Scope, wanted: int | None) -> Grant:
    """The grant of a request with the field ``priority`` ``wanted`` (None: no such field). Without API keys any
    priority is allowed.

    Raises: RequestFailedError, 403, if the priority is more urgent than the request's key allows.
    """
    key, name = scope.get(_SCOPE_KEY), work_name_of(scope)
    if not isinstance(key, ApiKey):
        return Grant(wanted or 0, "", name)
    if wanted is None:
        return Grant(key.priority, key.name, name)
    if wanted < key.best_priority:
        message = f"priority: this API key may ask for {key.best_priority} at best (lower is more urgent)"
        raise RequestFailedError(403, message, param="priority", code="priority_not_allowed")
    return Grant(wanted, key.name, name)
