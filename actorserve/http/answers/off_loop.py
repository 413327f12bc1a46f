"""Work on large answers, which would delay all streams, is done in a thread."""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

MANY_LOGPROBS: Final = 1024
"""To read and write so many log-probabilities takes some 10 ms."""

T = TypeVar("T")


async def off_loop_if_large(work: Callable[[], T], num_logprobs: int) -> T:
    """Call ``work``, which handles ``num_logprobs`` log-probabilities: in a thread if these are many."""
    if num_logprobs < MANY_LOGPROBS:
        return work()
    return await asyncio.to_thread(work)
