"""Signals that ask a process to end."""

import asyncio
import signal
from collections.abc import Callable


def on_termination(callback: Callable[[], None], *more: signal.Signals) -> None:
    """Call ``callback`` on the running event loop for each SIGTERM, Ctrl-C, and signal in ``more``."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, *more):
        loop.add_signal_handler(number, callback)
