"""The processes that a measurement starts, and the folder for their sockets."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from actorserve.processes.status import PARENT_PID
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.paths import ROOT

_STOP_TIMEOUT_S = 10.0
_MAX_FOLDER_BYTES = 85  # a socket's path holds 107 bytes


@contextmanager
def socket_folder() -> Iterator[Path]:
    """A temporary folder. Raises: BenchError, if the paths of sockets in it would be too long."""
    with tempfile.TemporaryDirectory(prefix="actorserve-") as folder:
        if len(os.fsencode(folder)) > _MAX_FOLDER_BYTES:
            raise BenchError(f"the path of {folder} is too long for sockets; set TMPDIR to a shorter one")
        yield Path(folder)


@contextmanager
def running(
    command: Sequence[str], errors: IO[str] | None = None, environment: Mapping[str, str] | None = None
) -> "Iterator[subprocess.Popen[str]]":
    """A process that is told to end, and at last killed, when the context ends. ``errors`` gets its stderr."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), PARENT_PID: str(os.getpid()), **(environment or {})},
        start_new_session=True,  # so that only the measurement sees a Ctrl-C, and ends its processes
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=_STOP_TIMEOUT_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.communicate()
