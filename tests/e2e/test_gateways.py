"""Two gateways of one host behind one port, when one of them is killed, or told to stop."""

import hashlib
import json
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import TLS, Server, running, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.model]

SECRET = "a-key-of-few-requests"
MAX_OPEN = 6
CONFIG = """
[http]
gateways = 2
api_keys_file = "{keys}"
[cluster]
[workers]
count = 1
engine = "fake"
max_context_tokens = 8000
[supervision]
max_restarts = 1000
"""
HEADERS = {"authorization": f"Bearer {SECRET}"}


@pytest.fixture
def server(tmp_path: Path, default_model_path: Path) -> Iterator[Server]:
    keys = tmp_path / "keys.toml"
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    keys.write_text(f'[[key]]\nname = "team"\nsha256 = "{digest}"\nmax_open_requests = {MAX_OPEN}\n')
    keys.chmod(0o600)
    with running(tmp_path / "server", CONFIG.format(keys=keys), "--model", str(default_model_path)) as server:
        yield server


class Stream:
    """A client's stream on a connection of its own, and the gateway that serves it."""

    def __init__(self, server: Server, max_tokens: int, stack: ExitStack) -> None:
        body = {"model": server.model, "prompt": "x", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        client = stack.enter_context(httpx.Client(timeout=120, headers=HEADERS))
        self.response = stack.enter_context(client.stream("POST", f"{server.url}/v1/completions", json=body))
        self._lines = self.response.iter_lines()
        if self.response.status_code == httpx.codes.OK:
            next(self._lines)  # the stream has begun
        self.gateway = gateway_of(server, self.response.extensions["network_stream"].get_extra_info("socket"))

    def ends_well(self) -> bool:
        """Read to the end. False if the connection breaks before."""
        try:
            return "data: [DONE]" in list(self._lines)
        except httpx.RemoteProtocolError:
            return False


def gateway_of(server: Server, connection: socket.socket) -> str:
    """The name of the gateway process that has the other end of a TCP connection."""
    port, servers_port = connection.getsockname()[1], connection.getpeername()[1]
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    # Other programs' connections may come from the same port, to other ports.
    ends = f":{servers_port:04X}", f":{port:04X}"
    inode = next(row[9] for row in rows if row[1].endswith(ends[0]) and row[2].endswith(ends[1]))
    for name in ("gateway-0", "gateway-1"):
        pid = server.pid(name)
        if pid is None:
            continue
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if str(descriptor.readlink()) == f"socket:[{inode}]":
                    return name
            except FileNotFoundError:
                continue
    raise AssertionError("no gateway has this connection")


def metric(server: Server, name: str, gateway: str) -> float:
    """The sum of a metric over its labels, as ``gateway`` tells it."""
    while True:  # the kernel chooses a gateway for each connection
        with (
            httpx.Client(timeout=120, verify=TLS, headers=HEADERS) as client,
            client.stream("GET", f"{server.url}/metrics") as page,
        ):
            if gateway_of(server, page.extensions["network_stream"].get_extra_info("socket")) != gateway:
                continue
            lines = page.read().decode().splitlines()
            return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def test_a_killed_gateway_costs_only_its_own_streams(server: Server) -> None:
    """After kill -9 of one gateway the other serves new clients at once and its streams end well, the sums keep what
    the dead one counted, its share of a key's limit is given back, and both serve again.
    """
    with ExitStack() as stack:
        streams = [Stream(server, 3000, stack) for _ in range(MAX_OPEN)]
        while len({stream.gateway for stream in streams}) < 2:
            stack.close()
            streams = [Stream(server, 3000, stack) for _ in range(MAX_OPEN)]
        refused = Stream(server, 5, stack).response
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert json.loads(refused.read())["error"]["code"] == "too_many_open_requests"
        counted = metric(server, "vllm:generation_tokens_total", "gateway-1")
        first = server.pid("gateway-0")
        server.signal("gateway-0", signal.SIGKILL)
        # Its main thread may have ended before others that still hold its port.
        wait_until(lambda: not Path(f"/proc/{first}").exists(), "the end of the killed gateway")
        assert [served_by(server) for _ in range(6)] == ["gateway-1"] * 6
        for stream in streams:
            assert stream.ends_well() == (stream.gateway == "gateway-1")
    wait_until(lambda: server.pid("gateway-0") not in (None, first), "the restart")
    wait_until(lambda: ready(server), "both gateways")
    for gateway in ("gateway-0", "gateway-1"):
        assert metric(server, "vllm:generation_tokens_total", gateway) >= counted > 0
        assert metric(server, "actorserve_instances", gateway) == 1
    with ExitStack() as stack:
        again = [Stream(server, 20, stack) for _ in range(MAX_OPEN)]
        assert all(stream.ends_well() for stream in again)
    told = [metric(server, "vllm:request_success_total", gateway) for gateway in ("gateway-0", "gateway-1")]
    assert told[0] == told[1]


def ready(server: Server) -> bool:
    """Whether both gateways listen and know the worker."""
    seen = set()
    for _ in range(8):
        with httpx.Client(timeout=120, verify=TLS) as client, client.stream("GET", f"{server.url}/health") as answer:
            if answer.status_code == httpx.codes.OK:
                seen.add(gateway_of(server, answer.extensions["network_stream"].get_extra_info("socket")))
    return len(seen) == 2


def test_a_gateway_that_is_told_to_stop_loses_no_request(server: Server) -> None:
    """While one gateway after the other is stopped and restarted, every stream and every new connection is served."""
    with ExitStack() as stack:
        streams = [Stream(server, 3000, stack) for _ in range(MAX_OPEN - 1)]
        while len({stream.gateway for stream in streams}) < 2:
            stack.close()
            streams = [Stream(server, 3000, stack) for _ in range(MAX_OPEN - 1)]
        for gateway in ("gateway-0", "gateway-1"):
            first = server.pid(gateway)
            server.signal(gateway, signal.SIGTERM)
            while server.pid(gateway) == first:
                assert httpx.get(f"{server.url}/version", headers=HEADERS).status_code == httpx.codes.OK
            for stream in streams:
                if stream.gateway == gateway:
                    assert stream.ends_well()
            wait_until(lambda: ready(server), "both gateways")


def served_by(server: Server) -> str:
    """The gateway that answers a new client."""
    with httpx.Client(timeout=120, verify=TLS) as client, client.stream("GET", f"{server.url}/health") as answer:
        assert answer.status_code == httpx.codes.OK
        return gateway_of(server, answer.extensions["network_stream"].get_extra_info("socket"))


def test_a_port_in_use_is_found(server: Server, tmp_path: Path, default_model_path: Path) -> None:
    """A second server does not share the port of the first one's gateways: it ends with one line."""
    port = server.url.rpartition(":")[2]
    other = Server(make(tmp_path / "other"), "[cluster]\n", "--port", port, "--model", str(default_model_path))
    assert other.process.wait(60) != 0
    assert f"port {port} on 127.0.0.1 is in use" in other.log.read_text()


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder
