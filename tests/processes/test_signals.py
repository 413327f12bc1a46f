"""What signals do: SIGHUP has parts of a process read their files again."""

import asyncio
import logging
import os
import signal

import pytest

from actorserve.errors import SettingsError
from actorserve.processes.signals import on_reload


async def test_all_parts_read_their_files_again(caplog: pytest.LogCaptureFixture) -> None:
    """A part whose file is wrong is named in the log, and the others reload all the same, at each SIGHUP."""
    caplog.set_level(logging.INFO, logger="actorserve.processes")
    reloaded = asyncio.Event()
    num_calls = 0

    def broken() -> None:
        raise SettingsError("line 3 of keys.toml")

    def good() -> None:
        nonlocal num_calls
        num_calls += 1
        reloaded.set()

    on_reload([broken, good])
    try:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.wait_for(reloaded.wait(), 5.0)
            reloaded.clear()
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
    assert num_calls == 2
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert errors == ["not reloaded, what was read before still holds: line 3 of keys.toml"] * 2
