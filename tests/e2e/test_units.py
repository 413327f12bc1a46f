"""Servers as systemd runs them: as one unit, and each process as a unit, with a real socket in systemd's place."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.hosts import free_ports
from tests.e2e.server import ROOT, get, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.model]

START_S = 120.0
WATCHDOG_S = 4.0
CONFIG = """
[http]
lame_duck_s = 0.5
[workers]
count = 2
engine = "fake"
max_context_tokens = 8000
"""


class Unit:
    """A process with a notification socket, as a unit of ``Type=notify`` with a watchdog has it."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.news: list[dict[str, str]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(folder / f"{name}.notify"))
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "NOTIFY_SOCKET": str(folder / f"{name}.notify"),
            "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6)),
        }
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "actorserve", *arguments], stdout=log, stderr=log, env=environment
            )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while datagram := self._socket.recv(65536):
            self.news.append(dict(line.split("=", 1) for line in datagram.decode().split("\n")))
        self._socket.close()

    def has_said(self, name: str) -> bool:
        return any(name in news for news in self.news)

    def wait_for(self, name: str) -> None:
        wait_until(lambda: self.has_said(name) or self.process.poll() is not None, name, START_S)
        assert self.has_said(name), self.log.read_text()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"", self._socket.getsockname())


@contextmanager
def units(folder: Path) -> Iterator["Start"]:
    with ExitStack() as stack:
        yield Start(folder, stack)


class Start:
    """Starts units in a folder, and kills them at the end."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack

    def __call__(self, name: str, *arguments: str) -> Unit:
        unit = Unit(self._folder, name, *arguments)
        self._stack.callback(unit.close)
        return unit


def options(folder: Path, model: Path) -> tuple[tuple[str, ...], int]:
    """The options of `serve` with a free port, and the port."""
    config = folder / "actorserve.toml"
    config.write_text(CONFIG)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return ("--config", str(config), "--model", str(model), "--port", str(port)), port


def prepared(folder: Path, model: Path) -> tuple[Path, int]:
    """A runtime folder that `serve --prepare` has made, and the port."""
    runtime_dir = folder / "run"
    serve, port = options(folder, model)
    command = [sys.executable, "-P", "-m", "actorserve", "serve", *serve, "--prepare", str(runtime_dir)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=START_S)
    return runtime_dir, port


def test_a_whole_server_is_one_unit(tmp_path: Path, default_model_path: Path) -> None:
    """The server is READY when it can serve, and not before; its loop feeds the watchdog; it says that it stops."""
    serve, port = options(tmp_path, default_model_path)
    with units(tmp_path) as start:
        unit = start("server", "serve", *serve)
        unit.wait_for("READY")
        states = [news["STATUS"] for news in unit.news if "STATUS" in news]
        assert any(state.startswith("worker-") for state in states)
        assert unit.news[[("READY" in news) for news in unit.news].index(True)]["MAINPID"] == str(unit.process.pid)
        assert get(f"http://127.0.0.1:{port}/ready").status_code == 200
        unit.wait_for("WATCHDOG")
        assert unit.stop() == 0
        assert unit.has_said("STOPPING")


def test_each_process_is_a_unit(tmp_path: Path, default_model_path: Path) -> None:
    """Each prepared process becomes READY by itself and keeps other servers out; a gateway that stops is a lame duck,
    finishes its stream and ends with 0, and a second start of a process works.
    """
    runtime_dir, port = prepared(tmp_path, default_model_path)
    url = f"http://127.0.0.1:{port}"
    with units(tmp_path) as start:
        names = ("coordinator", "worker-0", "worker-1", "gateway-0")
        running = {name: start(name, "process", name, "--runtime-dir", str(runtime_dir)) for name in names}
        for unit in running.values():
            unit.wait_for("READY")
        wait_until(lambda: get(f"{url}/ready").json()["instances"] == 2, "both workers")

        other = (*options(tmp_path, default_model_path)[0], "--prepare", str(runtime_dir))
        second = start("second", "serve", *other)
        assert second.process.wait(START_S) == 1
        assert "another server uses the runtime folder" in second.log.read_text()

        assert running["worker-1"].stop() == 0
        again = start("worker-1-again", "process", "worker-1", "--runtime-dir", str(runtime_dir))
        again.wait_for("READY")

        body: dict[str, object] = {"prompt": "x", "max_tokens": 2000, "stream": True, "ignore_eos": True}
        body["model"] = get(f"{url}/v1/models").json()["data"][0]["id"]
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as stream:
            lines = stream.iter_lines()
            next(lines)
            running["gateway-0"].process.send_signal(signal.SIGTERM)
            running["gateway-0"].wait_for("STOPPING")
            stopping = time.monotonic()
            assert get(f"{url}/ready").status_code == 503
            assert "data: [DONE]" in list(lines)
        assert running["gateway-0"].process.wait(60) == 0
        assert time.monotonic() - stopping >= 0.5
        for name in ("worker-0", "coordinator"):
            assert running[name].stop() == 0


CLUSTER = """
id = "test"
coordinators = ["alpha"]
coordinator_port = {first}
kv_port = {second}
[[host]]
name = "alpha"
address = "127.0.0.1"
gateways = 1
workers = 1
[[host]]
name = "beta"
address = "127.0.0.2"
workers = 2
"""


def test_each_process_of_two_hosts_is_a_unit(tmp_path: Path, default_model_path: Path) -> None:
    """`host NAME --prepare` keeps the processes of its host alone; as units they form a cluster and reload; a host
    whose workers are told to stop loses no stream, because its requests move to the other host.
    """
    first = free_ports(4, ["127.0.0.1", "127.0.0.2"])
    cluster, settings = tmp_path / "cluster.toml", tmp_path / "actorserve.toml"
    cluster.write_text(CLUSTER.format(first=first, second=first + 1))
    http = f"[http]\nport = {first + 3}"
    settings.write_text(CONFIG.replace("[http]", http) + f'[model]\npath = "{default_model_path}"\n')
    url = f"http://127.0.0.1:{first + 3}"
    processes = {"alpha": ("coordinator", "gateway-0", "worker-0"), "beta": ("worker-0", "worker-1")}
    with units(tmp_path) as start:
        running = {}
        for host, names in processes.items():
            folder = str(tmp_path / host)
            arguments = ("host", host, "--cluster", str(cluster), "--config", str(settings), "--prepare", folder)
            assert start(f"{host}-prepare", *arguments).process.wait(START_S) == 0
            assert set(json.loads((tmp_path / host / "processes.json").read_text())) == set(names)
            for name in names:
                running[host, name] = start(f"{host}-{name}", "process", name, "--runtime-dir", folder)
        for unit in running.values():
            unit.wait_for("READY")
        wait_until(lambda: get(f"{url}/ready").json()["instances"] == 3, "all workers")
        for unit in running.values():
            unit.process.send_signal(signal.SIGHUP)

        body: dict[str, object] = {"prompt": "x", "max_tokens": 3000, "stream": True, "ignore_eos": True}
        body["model"] = get(f"{url}/v1/models").json()["data"][0]["id"]
        with ExitStack() as stack:
            streams = [
                stack.enter_context(httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120))
                for _ in range(6)
            ]
            lines = [stream.iter_lines() for stream in streams]
            for each in lines:
                next(each)
            stopping = [running["beta", name] for name in processes["beta"]]
            for unit in stopping:
                unit.process.send_signal(signal.SIGTERM)
            assert [unit.process.wait(60) for unit in stopping] == [0, 0]
            assert all("data: [DONE]" in list(each) for each in lines)
        for name in reversed(processes["alpha"]):
            assert running["alpha", name].stop() == 0


def test_mistakes_are_one_line(tmp_path: Path, default_model_path: Path) -> None:
    """A process of a folder that nothing prepared, and one that the settings do not have, end with one line."""
    runtime_dir, _ = prepared(tmp_path, default_model_path)
    for name, folder, line in (
        ("worker-0", tmp_path / "absent", "nothing is prepared in"),
        ("worker-7", runtime_dir, "there is no process worker-7: the settings have coordinator, gateway-0, worker-0"),
    ):
        command = [sys.executable, "-P", "-m", "actorserve", "process", name, "--runtime-dir", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 1
        assert line in done.stderr
        assert done.stderr.count("\n") == 1
