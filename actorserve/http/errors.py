"""Turns errors into answers: ``{"error": {"message", "type", "param", "code"}}``.

The texts are our own and never those of other libraries' exceptions, so clients see no stack trace and no address.
"""

import math
from collections.abc import Mapping
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from actorserve.core.effects import End
from actorserve.core.messages import FinishReason, RefusalReason
from actorserve.errors import ActorserveError, InvalidRequestError
from actorserve.http.not_offered import not_offered


class RequestFailedError(ActorserveError):
    """An answer that is an error, with its HTTP status. The client is told ``retry_after_s`` unless it is None."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, object]:
        """The error in the form that clients of this API know."""
        return {
            "error": {
                "message": self.message,
                "type": _error_type(self.status),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The whole answer. ``retry_after_s`` is rounded up, because the header takes whole seconds."""
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return JSONResponse(self.body(), self.status, headers)


def _refused(reason: RefusalReason, retry_after_s: float) -> RequestFailedError:
    match reason:
        case RefusalReason.TOO_LARGE:
            message = "the request is too large for every instance: shorten the prompt or lower max_tokens"
            return RequestFailedError(400, message, code="context_length_exceeded")
        case RefusalReason.OVERLOADED:
            message = "too many requests are waiting; try again later"
            return RequestFailedError(429, message, code="overloaded", retry_after_s=retry_after_s)
        case RefusalReason.NO_INSTANCE:
            message = "no worker is available to serve the request; try again later"
            return RequestFailedError(503, message, code="no_instance", retry_after_s=retry_after_s)
        case RefusalReason.DRAINING:
            message = "the server is shutting down; try again later"
            return RequestFailedError(503, message, code="draining", retry_after_s=retry_after_s)


def failure_of(end: End) -> RequestFailedError | None:
    """The error that a client gets instead of (the rest of) the answer. None if the request ended well."""
    if end.refusal is not None:
        return _refused(end.refusal, end.retry_after_s)
    if end.reason is FinishReason.ERROR:
        message = "the request failed while its answer was being generated"
        return RequestFailedError(500, message, code="generation_failed")
    return None


async def on_failed_request(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestFailedError)
    return error.response()


async def on_invalid_request(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, InvalidRequestError)
    return RequestFailedError(400, str(error), error.param, error.code).response()


async def on_http_exception(request: Request, error: Exception) -> JSONResponse:
    """Unknown routes, and methods that a route does not support."""
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.NOT_FOUND:
        refusal = not_offered(request.scope["path"])
        message, code = (refusal, "not_offered") if refusal else ("this route does not exist", "not_found")
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message, code = f"this route does not support {request.method[:16]}", "method_not_allowed"
    else:
        message, code = HTTPStatus(error.status_code).phrase.lower(), None
    response = RequestFailedError(error.status_code, message, code=code).response()
    _add_headers(response, error.headers)
    return response


async def on_unexpected_error(_: Request, __: Exception) -> JSONResponse:
    """A bug. The exception itself propagates to the server, which logs it (``http.server``)."""
    return RequestFailedError(500, "internal error", code="internal_error").response()


def _add_headers(response: JSONResponse, headers: Mapping[str, str] | None) -> None:
    for name, value in (headers or {}).items():
        response.headers[name] = value


def _error_type(status: int) -> str:
    match status:
        case 404:
            return "not_found_error"
        case 429:
            return "rate_limit_error"
        case 503:
            return "overloaded_error"
        case _ if status >= 500:
            return "server_error"
        case _:
            return "invalid_request_error"
