"""Real servers for tests: started by the command line, and observed through output, processes and journals."""

import os
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from actorserve.core.instance.state import InstanceState
from actorserve.errors import ProtocolError
from actorserve.wire.replay import Replay, replay

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0
"""Long enough for a slow machine that others compute on as well."""
_POLL_S = 0.02
TLS = ssl.create_default_context()  # which no URL of a test needs, but httpx takes 30 ms to make one for each request


def get(url: str) -> httpx.Response:
    """An answer on a connection of its own. Tests ask for it again and again beside the server that they test."""
    return httpx.get(url, verify=TLS)


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Check ``condition`` until it holds. Raises: AssertionError after the deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {deadline_s:.0f} s for: {what}")
        time.sleep(_POLL_S)


class Server:
    """A running ``actorserve serve``, or another ``verb``, with all of its children."""

    def __init__(
        self,
        folder: Path,
        config: str,
        *arguments: str,
        program: tuple[str, ...] = ("actorserve",),
        verb: tuple[str, ...] = ("serve", "--port", "0"),
        prefix: tuple[str, ...] = (),
    ) -> None:
        """``program``: the module to run, and its arguments before the verb. ``prefix``: a command that runs it."""
        self.journals = folder / "journals"
        config_file = folder / "actorserve.toml"
        config_file.write_text(config.replace("[cluster]", f'[cluster]\njournal_dir = "{self.journals}"'))
        self.log = folder / "stderr.log"
        command = [*prefix, sys.executable, "-P", "-m", *program, *verb, "--config", str(config_file)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self.stdout = folder / "stdout.log"
        with self.log.open("wb") as stderr, self.stdout.open("wb") as stdout:
            self.process = subprocess.Popen(
                [*command, *arguments], stdout=stdout, stderr=stderr, env=environment, cwd=folder
            )

    def wait_ready(self) -> None:
        wait_until(lambda: "ready:" in self.stdout.read_text() or self.process.poll() is not None, "ready")
        assert self.process.poll() is None, self.log.read_text()

    @property
    def url(self) -> str:
        found = re.search(r"^ready: .* at (http://\S+)$", self.stdout.read_text(), re.MULTILINE)
        assert found is not None
        return found[1]

    @property
    def model(self) -> str:
        found = re.search(r"^ready: (.*) at http", self.stdout.read_text(), re.MULTILINE)
        assert found is not None
        return found[1]

    def pid(self, name: str) -> int | None:
        """The process id of the child called ``name``; None while it does not run."""
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(parent) != self.process.pid or state == "Z":
                    continue
                arguments = (entry / "cmdline").read_bytes().decode().split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if name in arguments:
                return int(entry.name)
        return None

    def signal(self, name: str, number: signal.Signals) -> None:
        pid = self.pid(name)
        assert pid is not None, f"{name} is not running"
        os.kill(pid, number)

    def journal(self, name: str) -> Path:
        """The journal of the newest incarnation of ``name``."""
        return max(
            self.journals.glob(f"{name.replace('/', '.')}-*.journal"),
            key=lambda path: int(path.stem.rpartition("-")[2]),
        )

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels; -1 while it cannot be read."""
        try:
            text = get(f"{self.url}/metrics").text
        except httpx.TransportError:
            return -1.0
        values = [float(line.split()[-1]) for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return sum(values) if values else -1.0

    def wait_workers(self, count: int) -> None:
        """Wait until ``count`` workers have reported to the gateway."""
        wait_until(lambda: self.num_reporting() == count, f"{count} workers")

    def num_reporting(self) -> int:
        try:
            text = get(f"{self.url}/metrics").text
        except httpx.TransportError:
            return -1
        return sum(line.startswith("vllm:kv_cache_usage_perc{") for line in text.splitlines())

    def stop(self, deadline_s: float = DEADLINE_S) -> int:
        """Ctrl-C; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@contextmanager
def running(folder: Path, config: str, *arguments: str, program: tuple[str, ...] = ("actorserve",)) -> Iterator[Server]:
    """A server that is ready. It is stopped at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    server = Server(folder, config, *arguments, program=program)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def replayed(journal: Path) -> Replay:
    """Replay a journal. Raises: AssertionError if the new core gives other effects."""
    with journal.open("rb") as file:
        try:
            result = replay(file)
        except ProtocolError as error:
            raise AssertionError(f"{journal.name}: {error}") from error
    assert result.difference is None, f"{journal.name}: {result.difference}"
    return result


def instance_of(journal: Path) -> InstanceState:
    """The core of this journal's worker after its last recorded input."""
    core = replayed(journal).core
    assert isinstance(core, InstanceState)
    return core
