"""The server that clients are pointed at: ``actorserve serve`` on a free port, with an API key."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.compatibility.environments import ROOT
from tools.compatibility.errors import CompatibilityError

Settings = Mapping[str, Mapping[str, str | int | list[str]]]
"""Section -> name -> value, as in the settings file."""

_START_TIMEOUT_S: Final = 300.0
_STOP_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.05
_READY: Final = re.compile(r"^ready: (?P<model>.*) at (?P<url>http://\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that is ready, and the name of its model."""

    url: str
    model: str


@contextmanager
def running_server(
    arguments: Sequence[str] = (), *, key: str = "", settings: Settings | None = None, python: str = sys.executable
) -> Iterator[RunningServer]:
    """A server with one worker from its start to its end. With a key, requests need it.
    ``python`` is the one of our own environment.

    Raises: CompatibilityError if it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="clients-") as temporary:
        folder = Path(temporary)
        sections = {section: dict(values) for section, values in (settings or {}).items()}
        if key:
            sections.setdefault("http", {})["api_keys_file"] = str(_keys_file(folder, key))
        config, log = folder / "actorserve.toml", folder / "log"
        config.write_text(_toml(sections), "utf-8")
        command = [python, "-P", "-m", "actorserve", "serve", "--config", str(config), "--port", "0"]
        with log.open("wb") as output:
            # A session of its own: only this program sees a Ctrl-C, and then ends the server.
            process = subprocess.Popen(
                [*command, "--workers", "1", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        try:
            yield _wait_until_ready(process, log)
        finally:
            _stop(process)


def _keys_file(folder: Path, key: str) -> Path:
    file = folder / "keys.toml"
    file.touch(mode=0o600)
    file.write_text(f'[[key]]\nname = "client"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n', "utf-8")
    return file


def _toml(sections: Settings) -> str:
    """A settings file. JSON writes strings, numbers and lists as TOML does."""
    lines: list[str] = []
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
    return "\n".join(lines) + "\n"


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> RunningServer:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        told = log.read_text("utf-8", errors="replace")
        if found := _READY.search(told):
            return RunningServer(found["url"], found["model"])
        if process.poll() is not None:
            raise CompatibilityError(f"the server does not start: {(told.strip().splitlines() or ['no output'])[-1]}")
        time.sleep(_POLL_S)
    raise CompatibilityError(f"the server is not ready after {_START_TIMEOUT_S:.0f} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
