"""Errors as Anthropic's API tells them: ``{"type": "error", "error": {"type", "message"}, "request_id"}``."""

from starlette.responses import JSONResponse
from starlette.types import Scope

from actorserve.http.access.request_id import request_id_of
from actorserve.http.errors import RequestFailedError

_OVERLOADED = 529
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    _OVERLOADED: "overloaded_error",
}


def error_body(failure: RequestFailedError, request_id: str) -> dict[str, object]:
    """The error as a client of this API knows it."""
    error = {"type": _error_type(_status(failure)), "message": failure.message}
    return {"type": "error", "error": error, "request_id": request_id}


def error_response(failure: RequestFailedError, request_id: str) -> JSONResponse:
    """The whole answer."""
    headers = failure.headers() | {"request-id": request_id}
    return JSONResponse(error_body(failure, request_id), _status(failure), headers)


def error_form(failure: RequestFailedError, scope: Scope) -> JSONResponse:
    """The ``ErrorForm`` of this API."""
    return error_response(failure, request_id_of(scope))


def _status(failure: RequestFailedError) -> int:
    """An overload has a status of its own in this API."""
    return _OVERLOADED if failure.status == 503 else failure.status


def _error_type(status: int) -> str:
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
