"""A request as its instance holds it."""

import sys

from actorserve.core.messages import RequestSpec, SamplingParams
from actorserve.core.request import Request
from tests.core.harness.driver import GATEWAY


def test_a_token_takes_four_bytes() -> None:
    """A request's tokens take four bytes each, however the request got them, and an eighth more for those to come."""
    given = tuple(range(2**31 - 10_000, 2**31))
    request = Request(RequestSpec("r", given, SamplingParams(seed=0, max_tokens=20_000)), 1, GATEWAY)
    for token_id in range(5_000):
        request.append(token_id, None)
    request.append_run(7, 5_000)
    assert tuple(request.token_ids) == (*given, *range(5_000), *(7,) * 5_000)
    assert sys.getsizeof(request.token_ids) < 4.5 * len(request.token_ids)
