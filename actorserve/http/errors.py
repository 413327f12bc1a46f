"""Turns errors into answers: ``{"error": {"message", "type", "param", "code"}}``, or another protocol's form.

The texts are our own and never those of other libraries' exceptions, so clients see no stack trace and no address.
"""

import math
from collections.abc import Callable, Mapping
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from actorserve.core.effects import End
from actorserve.core.messages import FinishReason, RefusalReason
from actorserve.errors import ActorserveError, InvalidRequestError
from actorserve.http.not_offered import not_offered
from actorserve.http.record import Record, record_of


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

    def headers(self) -> dict[str, str]:
        """The answer's headers. ``retry_after_s`` is rounded up, because the header takes whole seconds."""
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body(), self.status, self.headers())


ErrorForm = Callable[[RequestFailedError, Scope], Response]
"""Makes the whole answer to a request of this scope."""
_FORM = "actorserve.error_form"


class ErrorForms:
    """ASGI middleware: under some paths, errors have the form of another protocol than OpenAI's.

    ``forms`` has the form for each of these paths and the paths below it.
    """

    def __init__(self, app: ASGIApp, forms: Mapping[str, ErrorForm]) -> None:
        self._app = app
        self._forms = forms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        for above, form in self._forms.items():
            if path == above or path.startswith(f"{above}/"):
                scope[_FORM] = form
        await self._app(scope, receive, send)


def error_response(failure: RequestFailedError, scope: Scope) -> Response:
    """The whole answer, in the form that belongs to the request's path."""
    note_failure(failure, record_of(scope))
    form: ErrorForm | None = scope.get(_FORM)
    return failure.response() if form is None else form(failure, scope)


def note_failure(failure: RequestFailedError, record: Record) -> None:
    """The request's line in the log says why it failed."""
    record.error, record.error_code = failure.message, failure.code


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
        case RefusalReason.CANCELLED:
            # Clients repeat a request that failed with 409 or 5xx by themselves, and the operator wants it to end.
            return RequestFailedError(403, "an operator has ended the request", code="cancelled")


def failure_of(end: End) -> RequestFailedError | None:
    """The error that a client gets instead of (the rest of) the answer. None if the request ended well."""
    if end.refusal is not None:
        return _refused(end.refusal, end.retry_after_s)
    if end.reason is FinishReason.ERROR:
        # Workers fail a request for one reason only: its grammar met a limit in the middle of the answer. A retry would
        # meet it again.
        message = "the grammar of the answer needs too much time or memory to follow; use a simpler one"
        return RequestFailedError(400, message, code="invalid_grammar")
    return None


async def on_failed_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestFailedError)
    return error_response(error, request.scope)


async def on_invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, InvalidRequestError)
    return error_response(RequestFailedError(400, str(error), error.param, error.code), request.scope)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Unknown routes, and methods that a route does not support."""
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.NOT_FOUND:
        refusal = not_offered(request.scope["path"])
        message, code = (refusal, "not_offered") if refusal else ("this route does not exist", "not_found")
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message, code = f"this route does not support {request.method[:16]}", "method_not_allowed"
    else:
        message, code = HTTPStatus(error.status_code).phrase.lower(), None
    response = error_response(RequestFailedError(error.status_code, message, code=code), request.scope)
    _add_headers(response, error.headers)
    return response


async def on_unexpected_error(request: Request, _: Exception) -> Response:
    """A bug. The exception itself propagates to the server, which logs it (``http.server``)."""
    return error_response(RequestFailedError(500, "internal error", code="internal_error"), request.scope)


def _add_headers(response: Response, headers: Mapping[str, str] | None) -> None:
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
