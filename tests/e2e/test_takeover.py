"""Two coordinators on two hosts: whichever dies or pauses, the other one serves, and no stream notices."""

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.clients import under_load
from tests.e2e.hosts import CONFIG, Hosts, hosts_running
from tests.e2e.server import ROOT, Server, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.model]

SHARES = {"alpha": "workers = 1", "beta": "workers = 1", "gamma": "gateways = 1\nworkers = 1"}
COORDINATORS = ("alpha", "beta")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("takeover")
    with hosts_running(folder, CONFIG.format(model=default_model_path), SHARES, len(COORDINATORS)) as hosts:
        hosts.hosts["gamma"].wait_workers(3)
        yield hosts


@pytest.fixture
def gateway(hosts: Hosts) -> Server:
    """The host with the gateway, while all workers are up."""
    server = hosts.hosts["gamma"]
    server.wait_workers(3)
    return server


def _serving(gateway: Server) -> tuple[str, int]:
    """The host whose coordinator serves, and its term, as the gateway follows it."""
    found = re.findall(r"gamma/gateway-0 follows (\w+)/coordinator in term (\d+)", gateway.log.read_text())
    return found[-1][0], int(found[-1][1])


def _wait_takeover(gateway: Server, before: tuple[str, int]) -> tuple[str, int]:
    wait_until(lambda: _serving(gateway) != before, "another coordinator serves")
    after = _serving(gateway)
    assert after[1] > before[1]
    return after


def _console(hosts: Hosts, host: str, *command: str) -> tuple[int, str]:
    """The exit status and the answers, in JSON, of a console on ``host``."""
    pid = hosts.hosts[host].pid(f"{host}/coordinator")
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    folder = arguments[arguments.index("--runtime-dir") + 1]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "actorserve", "console", "--runtime-dir", folder, *command, "--json"],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_killed_coordinator_is_replaced(hosts: Hosts, gateway: Server) -> None:
    """kill -9 of the coordinator that serves, twice, under streams: the other one serves, and every client gets its
    undisturbed answer.
    """

    def disturb() -> None:
        serving = _serving(gateway)
        for _ in range(2):
            host = serving[0]
            hosts.hosts[host].signal(f"{host}/coordinator", signal.SIGKILL)
            serving = _wait_takeover(gateway, serving)
            assert serving[0] != host
            gateway.wait_workers(3)

    assert asyncio.run(under_load(gateway, disturb)) > 0


def test_a_paused_coordinator_is_replaced_and_ignored(hosts: Hosts, gateway: Server) -> None:
    """SIGSTOP of the coordinator that serves, for less and for more than death's limit: the other one takes over, and
    the first one stands by when it wakes.
    """

    def disturb() -> None:
        for is_longer in (False, True):
            before = _serving(gateway)
            paused = hosts.hosts[before[0]]
            num_lines = paused.log.read_text().count("stands by")
            paused.signal(f"{before[0]}/coordinator", signal.SIGSTOP)
            after = _wait_takeover(gateway, before)
            if is_longer:
                time.sleep(2.0)
            paused.signal(f"{before[0]}/coordinator", signal.SIGCONT)
            if not is_longer:
                wait_until(lambda: paused.log.read_text().count("stands by") > num_lines, "it stands by")  # noqa: B023
            time.sleep(1.0)
            assert _serving(gateway) == after

    assert asyncio.run(under_load(gateway, disturb)) > 0


def test_a_killed_host_of_the_coordinator_costs_no_token(hosts: Hosts, gateway: Server) -> None:
    """kill -9 of the whole host of the coordinator that serves, with its worker: the other coordinator serves, and the
    host stands by when it is back.
    """

    def disturb() -> None:
        before = _serving(gateway)
        hosts.kill(before[0])
        after = _wait_takeover(gateway, before)
        hosts.start(before[0]).wait_ready()
        gateway.wait_workers(3)
        time.sleep(1.0)
        assert _serving(gateway) == after

    assert asyncio.run(under_load(gateway, disturb)) > 0


def test_operators_are_told_which_coordinator_serves(hosts: Hosts, gateway: Server) -> None:
    """``status`` names the coordinator and its term; a standby refuses in one line that names it."""
    serving, term = _serving(gateway)
    [standby] = [host for host in COORDINATORS if host != serving]
    code, answer = _console(hosts, serving, "status")
    assert code == 0
    assert f"{serving}/coordinator" in answer
    code, answer = _console(hosts, standby, "status")
    assert code == 1
    assert f"this is a standby: {serving}/coordinator serves, in term {term}" in answer


def test_a_cordon_survives_a_takeover(hosts: Hosts, gateway: Server) -> None:
    """A worker that an operator cordoned stays so under the next coordinator, which can take that back."""
    serving = _serving(gateway)
    assert _console(hosts, serving[0], "cordon", "gamma/worker-0")[0] == 0
    hosts.hosts[serving[0]].signal(f"{serving[0]}/coordinator", signal.SIGKILL)
    serving = _wait_takeover(gateway, serving)

    def states() -> str:
        return _console(hosts, serving[0], "workers", "gamma/worker-0")[1]

    wait_until(lambda: "cordoned" in states(), "the cordon is known")
    assert _console(hosts, serving[0], "uncordon", "gamma/worker-0")[0] == 0
    wait_until(lambda: "cordoned" not in states(), "it is open again")


def test_orders_survive_the_death_of_a_whole_host(hosts: Hosts, gateway: Server) -> None:
    """The cordon of a worker that dies with the coordinator that serves holds when the worker is back, and so does a
    value that was set.
    """
    serving = _serving(gateway)
    worker = f"{serving[0]}/worker-0"
    assert _console(hosts, serving[0], "cordon", worker)[0] == 0
    assert _console(hosts, serving[0], "set", "migration.rest_s", "7")[0] == 0
    hosts.kill(serving[0])
    after = _wait_takeover(gateway, serving)
    assert "it was 7" in _console(hosts, after[0], "set", "migration.rest_s", "8", "--dry-run")[1]
    hosts.start(serving[0]).wait_ready()
    gateway.wait_workers(3)
    wait_until(lambda: "cordoned" in _console(hosts, after[0], "workers", worker)[1], "the cordon is known")
    assert _console(hosts, after[0], "uncordon", worker)[0] == 0
