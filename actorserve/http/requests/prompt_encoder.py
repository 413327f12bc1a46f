"""Encodes prompts off the event loop. A prompt that cannot fit is given up before all of its tokens are made."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from actorserve.http.errors import RequestFailedError
from actorserve.http.requests.token_floor import TokenFloor
from actorserve.model_files.tokenizer import Tokenizer

LONG_CHARS: Final = 16 * 1024
"""From this length on a prompt is long: reading it takes more than some 10 ms."""
_LONG_AT_ONCE: Final = 2
_NICENESS: Final = 10  # more than that of the process
_MOST_NICE: Final = 19
_RETRY_S: Final = 1.0

T = TypeVar("T")


class PromptEncoder:
    """Encodes prompts in threads: long ones in few threads with a low priority, so that they do not delay the event
    loop or the reading of short ones.
    """

    def __init__(self, tokenizer: Tokenizer, max_at_once: int) -> None:
        """``max_at_once`` calls of ``off_loop`` may run or wait at once; further calls are refused."""
        self._floor = TokenFloor(tokenizer)
        self._max_at_once = max_at_once
        self._num_reading = 0
        self._long = ThreadPoolExecutor(_LONG_AT_ONCE, "long-prompts", initializer=_be_nice)

    async def off_loop(self, read: Callable[[], T], num_chars: int) -> T:
        """Call ``read``, which encodes about ``num_chars`` characters, in a thread.

        Raises: RequestFailedError, 429, if too many prompts are being read; whatever ``read`` raises.
        """
        if self._num_reading >= self._max_at_once:
            message = "too many prompts are being read; try again later"
            raise RequestFailedError(429, message, code="overloaded", retry_after_s=_RETRY_S)
        self._num_reading += 1
        try:
            pool = self._long if num_chars >= LONG_CHARS else None
            return await asyncio.get_running_loop().run_in_executor(pool, read)
        finally:
            self._num_reading -= 1

    def encode(self, text: str, parts: Iterable[list[int]], limit: int) -> tuple[int, ...] | None:
        """The token ids of ``text``, whose parts make them as they are taken; None if there are ``limit`` or more.

        It blocks, so call it in ``off_loop``.
        """
        if self._floor.reaches(text, limit):
            return None
        token_ids: list[int] = []
        for part in parts:
            token_ids += part
            if len(token_ids) >= limit:
                return None
        return tuple(token_ids)


def _be_nice() -> None:
    """Lower the priority of the calling thread. On Linux a thread has a priority of its own."""
    thread_id = threading.get_native_id()
    niceness = os.getpriority(os.PRIO_PROCESS, thread_id) + _NICENESS
    os.setpriority(os.PRIO_PROCESS, thread_id, min(niceness, _MOST_NICE))
