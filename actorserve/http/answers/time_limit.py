"""How long an answer may take: as long as the server allows, or as its client asks."""

import math

from starlette.types import Scope

from actorserve.http.errors import RequestFailedError

TIMEOUT_HEADER = "x-request-timeout"
_MAX_CHARS = 32


def time_limit_s(scope: Scope, most_s: float) -> float:
    """The limit of one answer in seconds: ``most_s``, or what the header ``x-request-timeout`` asks for if that
    is less.

    Raises: RequestFailedError, 400, unless the header is one positive number.
    """
    name = TIMEOUT_HEADER.encode()
    values = [value for header, value in scope["headers"] if header == name]
    if not values:
        return most_s
    wanted_s = _number(values[0]) if len(values) == 1 else math.nan
    if not 0.0 < wanted_s < math.inf:
        message = f"the header {TIMEOUT_HEADER} must be one positive number, the seconds that the answer may take"
        raise RequestFailedError(400, message, param=TIMEOUT_HEADER, code="invalid_header")
    return min(wanted_s, most_s)


def timed_out(limit_s: float) -> RequestFailedError:
    """The end of an answer that was not complete in time."""
    message = f"the answer was not complete within its {limit_s:g} seconds"
    return RequestFailedError(408, message, code="timeout")


def _number(value: bytes) -> float:
    try:
        return float(value) if len(value) <= _MAX_CHARS else math.nan
    except ValueError:
        return math.nan
