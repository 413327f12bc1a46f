"""A server of several gateways and workers, whose processes a measurement restarts."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import httpx

from tools.benchmarks.common.children import running
from tools.benchmarks.common.errors import BenchError

_LAME_DUCK_S = 1.0
_CONFIG = """
[http]
gateways = {gateways}
lame_duck_s = {lame_duck_s}
[supervision]
max_restarts = 1000
backoff_s = 0.1
max_backoff_s = 0.1
"""


class RollingServer:
    """``actorserve serve`` with its runtime folder, from ``with`` to its end."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._stack = ExitStack()
        self._config = folder / "actorserve.toml"
        self._config.write_text(_CONFIG.format(gateways=arguments.gateways, lame_duck_s=_LAME_DUCK_S))
        self._command = [
            *(sys.executable, "-P", "-m", "actorserve", "serve", "--config", str(self._config)),
            *("--runtime-dir", str(folder), "--port", str(port), "--device", "cpu", "--model", arguments.model),
            *("--workers", str(arguments.workers), "--engine", arguments.engine),
        ]

    def __enter__(self) -> Self:
        self._log = self._stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
        self._process: subprocess.Popen[str] = self._stack.enter_context(running(self._command, self._log))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def wait_ready(self, within_s: float) -> None:
        """Raises: BenchError."""
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s and self._process.poll() is None:
            try:
                if httpx.get(f"{self.url}/ready", trust_env=False).status_code == httpx.codes.OK:
                    return
            except httpx.HTTPError:
                pass  # not yet
            time.sleep(0.1)
        self._log.seek(0)
        lines = self._log.read().strip().splitlines() or ["it printed nothing"]
        raise BenchError(f"the server did not become ready: {lines[-1][:300]}")

    def pid(self, name: str) -> int | None:
        """The process id of the child called ``name``; None while it does not run."""
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                arguments = (entry / "cmdline").read_bytes().decode().split("\0")
                fields = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == self._process.pid and fields[0] != "Z" and name in arguments:
                return int(entry.name)
        return None

    def signal(self, name: str, number: signal.Signals) -> None:
        """Raises: BenchError."""
        pid = self.pid(name)
        if pid is None:
            raise BenchError(f"{name} does not run")
        os.kill(pid, number)

    def listens(self, name: str) -> bool:
        """Whether a gateway accepts connections."""
        pid = self.pid(name)
        port = f":{int(self.url.rpartition(':')[2]):04X}"
        try:
            rows = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
            sockets = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(port) and row[3] == "0A"}
            return any(os.readlink(link) in sockets for link in Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            return False
