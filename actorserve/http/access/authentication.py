"""Which requests are allowed, and with which priority: ``Authorization: Bearer KEY`` on all routes except ``/health``
and ``/ping``.

Every wrong or missing key gets the same 401, before anything else of the request is read.
"""

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from actorserve.http.access.api_keys import ApiKey, ApiKeys
from actorserve.http.errors import RequestFailedError

OPEN_PATHS = ("/health", "/ping")
_SCOPE_KEY = "actorserve.api_key"


class Authentication:
    """ASGI middleware: lets requests with a valid key through, and notes the key in the scope."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await WebSocketClose()(scope, receive, send)
            return
        # The router uses the same path, which does not depend on the client's Host header.
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            secret = _secret(scope["headers"])
            key = self._keys.find(secret) if secret is not None else None
            if key is None:
                message = "a valid API key is needed, as the header: Authorization: Bearer KEY"
                response = RequestFailedError(401, message, code="invalid_api_key").response()
                response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
            scope[_SCOPE_KEY] = key
        await self._app(scope, receive, send)


def _secret(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The text after ``Bearer``. None if the header is missing, repeated, or of another scheme."""
    values = [value for name, value in headers if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, secret = values[0].strip().partition(b" ")
    return secret.strip() if scheme.lower() == b"bearer" else None


def granted_priority(scope: Scope, wanted: int | None) -> int:
    """The priority of a request with the field ``wanted`` (None: no such field). Without API keys any is allowed.

    Raises: RequestFailedError, 403, if the priority is more urgent than the request's key allows.
    """
    key = scope.get(_SCOPE_KEY)
    if not isinstance(key, ApiKey):
        return wanted or 0
    if wanted is None:
        return key.priority
    if wanted < key.best_priority:
        message = f"priority: this API key may ask for {key.best_priority} at best (lower is more urgent)"
        raise RequestFailedError(403, message, param="priority", code="priority_not_allowed")
    return wanted
