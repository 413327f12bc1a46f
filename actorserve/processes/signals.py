"""Signals that ask a process to end, or to read its files again."""

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from typing import Final

from actorserve.errors import ActorserveError

_log: Final = logging.getLogger("actorserve.processes")


def on_termination(callback: Callable[[], None], *more: signal.Signals) -> None:
    """Call ``callback`` on the running event loop for each SIGTERM, Ctrl-C, and signal in ``more``."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, *more):
        loop.add_signal_handler(number, callback)


def on_reload(parts: Sequence[Callable[[], None]]) -> None:
    """At each SIGHUP, have these parts read their files again, on the running event loop.

    A part whose files are wrong raises an ActorserveError and keeps what it had. The log tells the result of each.
    """

    def reload() -> None:
        for part in parts:
            try:
                part()
            except ActorserveError as error:
                _log.error("not reloaded, what was read before still holds: %s", error)
        _log.info("read the files again that may change while the server runs")

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
