"""How long an answer may take: as long as the server allows, or as its client asks."""

import math
import re

from starlette.types import Scope

from actorserve.http.errors import RequestFailedError

TIMEOUT_HEADER = "x-request-timeout"
_SECONDS = re.compile(rb"[0-9]{1,32}(\.[0-9]{0,32})?|\.[0-9]{1,32}")
"""Python itself would also read ``1_0`` and ``1e1``."""


def time_limit_s(scope: Scope, most_s: float) -> float:
    """The limit of one answer in seconds: ``most_s``, or what the header ``x-request-timeout`` asks for if that
    is less.

    Raises: RequestFailedError, 400, unless the header is one positive number in decimal digits.
    """
    name = TIMEOUT_HEADER.encode()
    values = [value for header, value in scope["headers"] if header == name]
    if not values:
        return most_s
    wanted_s = float(values[0]) if len(values) == 1 and _SECONDS.fullmatch(values[0]) else math.nan
    if not 0.0 < wanted_s < math.inf:
        text = "must be one positive number in decimal digits, the seconds that the answer may take"
        raise RequestFailedError(
            400, f"the header {TIMEOUT_HEADER} {text}", param=TIMEOUT_HEADER, code="invalid_header"
        )
    return min(wanted_s, most_s)


def timed_out(limit_s: float) -> RequestFailedError:
    """The end of an answer that was not complete in time."""
    message = f"the answer was not complete within its {limit_s:g} seconds"
    return RequestFailedError(408, message, code="timeout")
