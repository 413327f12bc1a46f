"""Servers that a measurement starts on free ports of this machine, and ends."""

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.paths import ROOT
from tools.benchmarks.peers.llama_build import LlamaBuild

_POLL_S = 0.02
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """A server's name and command; ``{port}`` stands for its port."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def our_server(model: str, dtype: str, num_workers: int, config: Path | None = None) -> ServerSpec:
    """``config``: a file with further settings."""
    return ServerSpec(
        f"actorserve {dtype}, {num_workers} worker{'s' if num_workers > 1 else ''}",
        (
            *(str(ROOT / "tools" / "serve"), "--model", model, "--dtype", dtype, "--device", "cpu"),
            *("--workers", str(num_workers), "--port", "{port}"),
            *(() if config is None else ("--config", str(config))),
        ),
    )


def llama_server(
    name: str, file: Path, built: LlamaBuild, num_threads: int, num_slots: int, slot_tokens: int
) -> ServerSpec:
    """llama-server with continuous batching over ``num_slots`` slots of ``slot_tokens`` each.

    It does not store the prompts of ended requests (``--cache-ram 0``): no prompt repeats, and storing takes time.
    """
    return ServerSpec(
        f"llama-server {name}",
        (
            *(str(built.server), "--model", str(file), "--host", "127.0.0.1", "--port", "{port}"),
            *("--parallel", str(num_slots), "--ctx-size", str(num_slots * slot_tokens), "--cont-batching"),
            *("--threads", str(num_threads), "--threads-batch", str(num_threads)),
            *("--batch-size", "512", "--ubatch-size", "512", "--flash-attn", "auto", "--cache-ram", "0"),
        ),
        built.environment,
    )


class RunningServer:
    """A server from its start to the end of its ``with`` block."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed at the end
        self.started_s = time.perf_counter()
        self._process = subprocess.Popen(
            [part.replace("{port}", str(port)) for part in spec.command],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **spec.environment},
            start_new_session=True,  # so that only the measurement sees a Ctrl-C, and ends its servers
        )

    @property
    def pid(self) -> int:
        """The id of the command's process: for ours, the supervisor."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()

    def first_token_s(self) -> float:
        """Ask for one token until the server gives it. Returns the time since the server's start.

        Raises: BenchError.
        """
        body = {"prompt": "Once upon a time", "max_tokens": 1, "temperature": 0.0, "stream": True}
        with httpx.Client(base_url=self.url, timeout=_START_TIMEOUT_S, trust_env=False) as client:
            while time.perf_counter() - self.started_s < _START_TIMEOUT_S:
                try:
                    models = client.get("/v1/models").raise_for_status().json()["data"]
                    if models and _gives_token(client, body | {"model": models[0]["id"]}):
                        return time.perf_counter() - self.started_s
                except httpx.HTTPError:
                    pass  # the server or its model is not ready yet
                if self._process.poll() is not None:
                    break
                time.sleep(_POLL_S)
        raise BenchError(f"{self.spec.name} gives no token: {self._last_words()}")

    def _last_words(self) -> str:
        self._log.seek(0)
        lines: Sequence[str] = self._log.read().strip().splitlines() or ["it printed nothing"]
        return lines[-1][:300]


def _gives_token(client: httpx.Client, body: dict[str, Any]) -> bool:
    with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        return any('"choices"' in line for line in answer.iter_lines())  # an error comes as an event, too
