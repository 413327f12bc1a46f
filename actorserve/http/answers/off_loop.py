"""Work on large answers, which would delay all streams, is done in a thread."""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

_MANY_PARTS: Final = 1024
"""To read and write so many log-probabilities, or pieces of text, takes some 10 ms."""

T = TypeVar("T")


async def off_loop_if_large(work: Callable[[], T], num_parts: int) -> T:
    """Call ``work``, which handles this many log-probabilities and pieces of text: in a thread if they are many."""
    if num_parts < _MANY_PARTS:
        return work()
    return await asyncio.to_thread(work)
