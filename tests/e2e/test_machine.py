"""The installed units in a machine of their own, which a real systemd has booted in namespaces."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.machine import LIBRARIES, Machine, machine
from tests.e2e.server import wait_until
from tests.workers.power.fake_driver import WATT, FakeDriver, build_library

NEEDED = ("/usr/lib/systemd/systemd", "/usr/bin/systemctl", "/usr/bin/unshare", "/usr/bin/nsenter", "/usr/bin/curl")
URL = "http://127.0.0.1:8000"
START_S = 120.0
WATCHDOG_S = 3
NUM_TOKENS = 600
SETTINGS = """
[http]
lame_duck_s = 0.2
[model]
path = "/srv/model.gguf"
name = "fake"
[workers]
count = 2
engine = "fake"
max_context_tokens = 8000
"""
CLUSTER = """
id = "test"
coordinators = ["alpha"]
[[host]]
name = "alpha"
address = "127.0.0.1"
gateways = 1
workers = 2
[[host]]
name = "beta"
address = "127.0.0.2"
workers = 1
"""
SERVICES = ("coordinator", "gateway@0", "worker@0", "worker@1")
SERVER, POWER = "actorserve.service", "actorserve-power.service"
FAKE_GPUS = """
[Service]
Environment=FAKE_NVML=/srv/gpus
ReadWritePaths=/srv/gpus
RestartSec=1
WatchdogSec=3
"""
BOTH = f"""
[Unit]
DefaultDependencies=no
Wants={SERVER} {POWER}
"""


def why_not() -> str:
    """Why no machine can boot here; empty if one can."""
    missing = [name for name in NEEDED if not Path(name).exists()]
    if missing:
        return f"there is no {', '.join(missing)}"
    if os.geteuid() != 0:
        return "only root can map the users of a machine"
    if not any(line.split()[2] == "cgroup2" for line in Path("/proc/mounts").read_text().splitlines()):
        return "control groups of version 2 are not mounted"
    words = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--cgroup", "--fork"]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode != 0:
        return "this machine allows no new namespaces"
    return ""


pytestmark = [
    pytest.mark.e2e,
    pytest.mark.model,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


@pytest.fixture
def driver(tmp_path: Path) -> FakeDriver:
    """A driver with two GPUs, the second of which has an operator's own limit."""
    library, gpus = tmp_path / "library", tmp_path / "gpus"
    library.mkdir()
    gpus.mkdir()
    driver = FakeDriver(build_library(library), gpus, 2)
    driver.put(1, "limit", 600 * WATT)
    return driver


@pytest.fixture
def host(tmp_path: Path, default_model_path: Path, driver: FakeDriver) -> Iterator[Machine]:
    """A machine with alpha's share of a cluster, and with GPUs whose power limits root may set."""
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER)
    files = {
        "etc/actorserve/actorserve.toml": SETTINGS,
        "etc/systemd/system/actorserve-worker@.service.d/fast.conf": f"[Service]\nWatchdogSec={WATCHDOG_S}\n",
        f"etc/systemd/system/{POWER}.d/fake.conf": FAKE_GPUS,
        "etc/systemd/system/both.target": BOTH,
    }
    numbers = [file for file in driver.folder.rglob("*") if file.is_file()]
    files |= {f"srv/gpus/{file.relative_to(driver.folder)}": file.read_text() for file in numbers}
    share = ("--host", "alpha", "--cluster", str(cluster))
    model = tmp_path / "model.gguf"  # a copy, because the units run as a user that may not read another user's cache
    shutil.copyfile(default_model_path, model)
    model.chmod(0o644)
    binds = {model: "/srv/model.gguf", driver.library.parent: LIBRARIES}
    with machine(tmp_path, *share, binds=binds, files=files) as host:
        driver.folder = host.tree / "srv/gpus"
        yield host


def stream(host: Machine, num_tokens: int) -> subprocess.Popen[str]:
    """A client inside that reads an answer of so many tokens, and has its beginning."""
    body = {"model": "fake", "prompt": "x", "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    words = ("--silent", "--no-buffer", "--header", "content-type: application/json", "--data", json.dumps(body))
    client = host.start("curl", *words, f"{URL}/v1/completions")
    assert client.stdout is not None
    while (line := client.stdout.readline()).startswith((":", "\n")):
        pass  # a comment that keeps the connection alive
    assert line.startswith("data: {"), line
    return client


def ends_well(client: subprocess.Popen[str]) -> bool:
    return "data: [DONE]" in client.communicate(timeout=START_S)[0]


def status(host: Machine, unit: str, name: str) -> str:
    return host.systemctl("show", "--value", f"--property={name}", unit)


def is_ready(host: Machine, num_workers: int) -> bool:
    answer = host.run("curl", "--silent", f"{URL}/ready").stdout
    return bool(answer) and json.loads(answer).get("instances") == num_workers


def test_a_share_runs_as_one_unit(host: Machine) -> None:
    """It is active when it serves, reloads, starts again after kill -9, drains at its end, and a console finds it."""
    unit = "actorserve.service"
    host.systemctl("start", unit)
    wait_until(lambda: is_ready(host, 2), "both workers", START_S)
    assert status(host, unit, "User") == "actorserve"
    done = host.run("actorserve", "console", "workers", "--json")
    assert {row["worker"] for row in json.loads(done.stdout)["rows"]} == {"alpha/worker-0", "alpha/worker-1"}
    first = status(host, unit, "MainPID")
    host.systemctl("reload", unit)
    assert (status(host, unit, "MainPID"), status(host, unit, "ActiveState")) == (first, "active")
    host.systemctl("kill", "--kill-who=main", "--signal=KILL", unit)
    wait_until(lambda: status(host, unit, "NRestarts") == "1" and is_ready(host, 2), "the restart", START_S)
    client = stream(host, NUM_TOKENS)
    host.systemctl("stop", unit)
    assert ends_well(client)
    assert (status(host, unit, "Result"), status(host, unit, "ActiveState")) == ("success", "inactive")


def test_each_process_of_a_share_is_a_unit(host: Machine) -> None:
    """A worker that restarts or hangs costs no stream, all reload, and the target ends them in order."""
    units = [f"actorserve-{name}.service" for name in SERVICES]
    host.systemctl("enable", "--now", "actorserve.target", *units)
    wait_until(lambda: is_ready(host, 2), "both workers", START_S)
    host.systemctl("is-active", *units)
    clients = [stream(host, NUM_TOKENS) for _ in range(4)]
    host.systemctl("restart", "actorserve-worker@1.service")
    host.systemctl("reload", "actorserve-[cgw]*")
    assert all(ends_well(client) for client in clients)

    clients = [stream(host, NUM_TOKENS) for _ in range(4)]
    host.systemctl("kill", "--signal=STOP", "actorserve-worker@0.service")
    silent = time.monotonic()
    wait_until(lambda: status(host, "actorserve-worker@0.service", "NRestarts") == "1", "systemd's watchdog", START_S)
    assert time.monotonic() - silent > WATCHDOG_S / 2
    assert all(ends_well(client) for client in clients)
    wait_until(lambda: is_ready(host, 2), "both workers", START_S)

    client = stream(host, NUM_TOKENS)
    host.systemctl("stop", "actorserve.target")
    assert ends_well(client)
    wait_until(lambda: {status(host, unit, "ActiveState") for unit in units} == {"inactive"}, "the ends", START_S)
    assert host.systemctl("list-units", "--state=failed", "--no-legend") == ""
    ends = [int(status(host, unit, "InactiveEnterTimestampMonotonic")) for unit in units]
    coordinator, gateway, *workers = ends
    assert gateway < min(workers) <= max(workers) < coordinator


def wait_for_limits(driver: FakeDriver, *limits: float) -> None:
    wait_until(lambda: (driver.limit(0), driver.limit(1)) == limits, f"the limits {limits}", START_S)


def test_the_actuator_of_power_caps_is_a_unit_of_its_own(host: Machine, driver: FakeDriver) -> None:
    """Started at once with the server, it runs as root, sets caps by the coordinator's order, and puts former limits
    back when it is stopped, and after kill -9 when it starts again. It goes on while the server is killed and stopped.
    """
    host.systemctl("start", "both.target")
    wait_until(lambda: status(host, POWER, "ActiveState") == "active", "the actuator", START_S)
    assert (status(host, POWER, "User"), status(host, SERVER, "User")) == ("root", "actorserve")
    first = status(host, POWER, "MainPID")

    def order(budget: str) -> None:
        wait_until(lambda: knows_devices(host), "the actuator's report", START_S)
        done = host.run("actorserve", "console", "budget", budget)
        assert done.returncode == 0, done.stderr

    order("800")
    wait_for_limits(driver, 422.0, 377.0)
    host.systemctl("kill", "--kill-who=main", "--signal=KILL", SERVER)
    wait_until(lambda: status(host, SERVER, "NRestarts") == "1" and is_ready(host, 2), "the restart", START_S)
    wait_for_limits(driver, 700.0, 600.0)  # because the new server has no budget
    order("1000")
    wait_for_limits(driver, 533.0, 466.0)
    assert (status(host, POWER, "MainPID"), status(host, POWER, "NRestarts")) == (first, "0")

    host.systemctl("stop", SERVER)
    host.systemctl("kill", "--kill-who=main", "--signal=KILL", POWER)
    assert (driver.limit(0), driver.limit(1)) == (533.0, 466.0)
    wait_for_limits(driver, 700.0, 600.0)
    assert status(host, POWER, "NRestarts") == "1"

    host.systemctl("start", SERVER)
    order("800")
    wait_for_limits(driver, 422.0, 377.0)
    host.systemctl("stop", POWER)
    assert (driver.limit(0), driver.limit(1)) == (700.0, 600.0)
    assert (status(host, POWER, "Result"), status(host, POWER, "ActiveState")) == ("success", "inactive")


def knows_devices(host: Machine) -> bool:
    """Whether the coordinator has a report of the actuator."""
    done = host.run("actorserve", "console", "cap", "--json")
    return done.returncode == 0 and len(json.loads(done.stdout)["rows"]) == 2
