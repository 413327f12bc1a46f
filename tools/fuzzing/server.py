"""The server that gets the input: real processes with a fake engine, over ipc as ``serve``, or over tcp as ``host``
without keys or, as ``curve``, with them.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from actorserve.processes.status import die_with_parent
from actorserve.wire.curve.key_files import make_key_pair, write_key_file
from actorserve.wire.trust import Holder, HolderKind
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.paths import ROOT
from tools.benchmarks.common.processes import memory_of
from tools.benchmarks.soak.processes import process_ids
from tools.fuzzing.errors import BrokenServerError, FuzzError
from tools.fuzzing.targets.control import Cluster
from tools.fuzzing.targets.target import Place

OVERS: Final = ("ipc", "tcp", "curve")
NUM_GATEWAYS: Final = 2
NUM_WORKERS: Final = 2
_START_S: Final = 120.0
_STOP_S: Final = 60.0
_READY: Final = re.compile(r"^ready: (.*) at http://127\.0\.0\.1:(\d+)$", re.MULTILINE)
_TROUBLE: Final = re.compile(r'Traceback|"level": "(error|critical)"|never awaited|never retrieved')
_CONFIG: Final = """
[cluster]
runtime_dir = "{folder}"
death_after_s = 5.0
[model]
path = "{model}"
[http]
port = 0
gateways = {gateways}
[workers]
count = {workers}
engine = "fake"
kv_cache_bytes = 1048576
[log]
format = "json"
"""
_CLUSTER: Final = """
id = "fuzzed"
coordinators = ["alpha"]
coordinator_port = {port}
kv_port = {kv_port}
[[host]]
name = "alpha"
address = "127.0.0.1"
{key}gateways = {gateways}
workers = {workers}
"""


def _free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        found: list[socket.socket] = []
        try:
            found.append(socket.create_server(("127.0.0.1", 0)))
            first = int(found[0].getsockname()[1])
            found += [socket.create_server(("127.0.0.1", first + number)) for number in range(1, count)]
        except (OSError, OverflowError):
            continue
        finally:
            for one in found:
                one.close()
        return first


class Server:
    """A running server. ``over``: one of ``OVERS``. ``keys``: the key pair of its host with CURVE.

    Raises: FuzzError if it does not start.
    """

    def __init__(self, over: str, model: str) -> None:
        self.over = over
        self._is_tcp = over != "ipc"
        self.keys = make_key_pair() if over == "curve" else None
        self._temporary = tempfile.TemporaryDirectory(prefix="actorserve-")
        self.folder = Path(self._temporary.name)
        runtime = self.folder / "r"
        self.log, self._out = self.folder / "stderr.log", self.folder / "stdout.log"
        config = _CONFIG.format(folder=runtime, model=model, gateways=NUM_GATEWAYS, workers=NUM_WORKERS)
        (self.folder / "actorserve.toml").write_text(config, encoding="utf-8")
        verb = ["serve"]
        self.port = 0
        if self._is_tcp:
            self.port = _free_ports(1 + NUM_WORKERS)
            verb = self._write_cluster()
        command = [sys.executable, "-P", "-m", "actorserve", *verb]
        with self.log.open("wb") as err, self._out.open("wb") as out:
            self._process = subprocess.Popen(
                [*command, "--config", str(self.folder / "actorserve.toml")],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
                cwd=self.folder,
                start_new_session=True,
                # so that no server stays when this process is killed; no other thread of ours runs now
                preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509
            )
        self._ids: dict[str, int] = {}
        self._log_read = 0

    def _write_cluster(self) -> list[str]:
        """Write the cluster's file and the host's key. Returns the command."""
        file, key_file, key = self.folder / "cluster.toml", self.folder / "keys" / "alpha.key", ""
        if self.keys is not None:
            write_key_file(key_file, self.keys, Holder(HolderKind.HOST, "alpha"))
            key = f'public_key = "{self.keys.public_key}"\n'
        ports = {"port": self.port, "kv_port": self.port + 1}
        file.write_text(_CLUSTER.format(key=key, gateways=NUM_GATEWAYS, workers=NUM_WORKERS, **ports), encoding="utf-8")
        return ["host", "alpha", "--cluster", str(file), "--key", str(key_file)]

    def __enter__(self) -> Self:
        until_s = time.monotonic() + _START_S
        while (found := _READY.search(self._out.read_text(encoding="utf-8"))) is None:
            if self._process.poll() is not None or time.monotonic() > until_s:
                self.__exit__(None, None, None)
                raise FuzzError(f"no server over {self.over}: {self._last_words}")
            time.sleep(0.05)
        self.model, self.http_port = found[1], int(found[2])
        self._ids = self._current_ids()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        self._last_words = lines[-1][:300] if lines else "it printed nothing"
        self._temporary.cleanup()

    @property
    def console_address(self) -> str:
        return f"ipc://{self.folder}/r/console.sock"

    @property
    def cluster(self) -> Cluster:
        if self._is_tcp:
            return Cluster(f"tcp://127.0.0.1:{self.port}", "tcp://127.0.0.1:*", "fuzzed", "alpha/", self.keys)
        return Cluster(f"ipc://{self.folder}/r/coordinator.sock", f"ipc://{self.folder}/f.sock")

    def kv_places(self) -> list[Place]:
        """Where workers serve KV. Raises: FuzzError if they do not."""
        if self._is_tcp:
            return [
                Place(f"KV of worker-{number}", ("127.0.0.1", self.port + 1 + number)) for number in range(NUM_WORKERS)
            ]
        return self._paths("*.kv.sock")

    def control_places(self) -> list[Place]:
        """The ROUTERs whose addresses are known."""
        if self._is_tcp:
            return [Place("coordinator", ("127.0.0.1", self.port))]
        return [place for place in self._paths("*.sock") if not place.name.endswith(".kv.sock")]

    def _paths(self, pattern: str) -> list[Place]:
        found = sorted((self.folder / "r").glob(pattern))
        if not found:
            raise FuzzError(f"no socket is called {pattern}")
        return [Place(path.name, str(path)) for path in found]

    def _current_ids(self) -> dict[str, int]:
        prefix = "alpha/" if self._is_tcp else ""
        names = [f"{prefix}coordinator", *(f"{prefix}gateway-{n}" for n in range(NUM_GATEWAYS))]
        return process_ids(self._process.pid, (*names, *(f"{prefix}worker-{n}" for n in range(NUM_WORKERS))))

    def check_processes(self) -> None:
        """Raises: BrokenServerError if a process has ended or was restarted, or has logged a failure."""
        if self._process.poll() is not None:
            raise BrokenServerError(f"the server has ended with exit status {self._process.returncode}")
        self.check_log()
        try:
            ids = self._current_ids()
        except BenchError as error:
            raise BrokenServerError(str(error)) from None
        changed = [name for name, number in self._ids.items() if ids[name] != number]
        if changed:
            raise BrokenServerError(f"died and was restarted: {', '.join(changed)}")

    def check_log(self) -> None:
        """Raises: BrokenServerError for a traceback, an error or a line that is cut or forged, since the last check."""
        with self.log.open("rb") as log:
            log.seek(self._log_read)
            text = log.read()
        text = text[: text.rfind(b"\n") + 1]
        self._log_read += len(text)
        for line in text.decode(errors="replace").splitlines():
            if _TROUBLE.search(line) or (line.startswith("{") and not _is_json(line)):
                raise BrokenServerError(f"logged: {line[-1500:]}")

    def rss_bytes(self) -> dict[str, int]:
        return {name: memory_of([number]).rss_bytes for name, number in self._ids.items()}

    def log_bytes(self) -> int:
        return self.log.stat().st_size


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return line.isprintable()
