"""The actuator as a process of its own beside a server, with a fake driver: caps come, stay, and are put back."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.operator import Console
from tests.e2e.server import ROOT, replayed, running, wait_until
from tests.folders import make_runtime_folder
from tests.workers.power.fake_driver import NO_PERMISSION, WATT, FakeDriver, build_library

pytestmark = [pytest.mark.e2e, pytest.mark.model]

CONFIG = """
[cluster]
runtime_dir = "{runtime_dir}"
heartbeat_s = 0.2
death_after_s = 1.5
[workers]
count = 1
engine = "fake"
kv_cache_bytes = 65536
[power]
alone_after_s = 1.0
"""
CONTROL_PERIOD_S = 1.0


class Rig:
    """A server, and actuators that are started for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        gpus = folder / "gpus"
        gpus.mkdir()
        self.driver = FakeDriver(build_library(folder), gpus, 2)
        self.runtime_dir = make_runtime_folder()
        self.console = Console(self.runtime_dir)
        self.log = folder / "power.log"

    @contextmanager
    def actuator(self) -> Iterator["subprocess.Popen[bytes]"]:
        """An actuator, which is killed at the end if it still runs."""
        options = ("--runtime-dir", str(self.runtime_dir), "--state-dir", str(self.folder / "state"))
        config = ("--config", str(self.folder / "actorserve.toml"))
        environment = os.environ | self.driver.environment | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        with self.log.open("ab") as log:
            command = [sys.executable, "-P", "-m", "actorserve", "power", *config, *options]
            process = subprocess.Popen(command, stderr=log, stdout=log, env=environment)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()

    def limits(self) -> tuple[float, float]:
        return self.driver.limit(0), self.driver.limit(1)

    def wait_for_limits(self, *limits: float) -> None:
        wait_until(lambda: self.limits() == limits, f"the limits {limits}")

    def knows_devices(self) -> bool:
        """Whether the coordinator has a report of the actuator."""
        rows = {row["name"]: row["value"] for row in self.console.rows("status")}
        return str(rows["power"]).startswith("2 device(s)")


def test_caps_come_from_a_budget_and_are_put_back(tmp_path: Path) -> None:
    """A budget is in force within a control period. A killed actuator's caps stay until the next one has put them back;
    a stopped one puts them back itself.
    """
    rig = Rig(tmp_path)
    rig.driver.put(1, "limit", 600 * WATT)
    with running(tmp_path, CONFIG.format(runtime_dir=rig.runtime_dir)) as server:
        with rig.actuator() as actuator:
            wait_until(rig.knows_devices, "the actuator's report")
            rig.console.act("budget", "800")
            began = time.monotonic()
            rig.wait_for_limits(422.0, 377.0)
            assert time.monotonic() - began < CONTROL_PERIOD_S
            rig.driver.put(0, "limit", 700 * WATT)
            rig.wait_for_limits(422.0, 377.0)
            actuator.send_signal(signal.SIGKILL)
            actuator.wait()
            assert rig.limits() == (422.0, 377.0)
        rig.console.act("budget", "none")
        with rig.actuator() as actuator:
            rig.wait_for_limits(700.0, 600.0)
            rig.console.act("budget", "1000")
            rig.wait_for_limits(533.0, 466.0)
            actuator.send_signal(signal.SIGTERM)
            assert actuator.wait(30.0) == 0
            assert rig.limits() == (700.0, 600.0)
    [journal] = server.journals.glob("coordinator*")
    assert replayed(journal).num_entries > 0


@pytest.mark.parametrize("moment", [1, 2], ids=["before the limit is set", "after the limit is set"])
def test_an_actuator_that_is_killed_while_it_sets_a_cap_has_saved_the_former_limit(moment: int, tmp_path: Path) -> None:
    """The driver kills the process in the middle of its first set. The next one puts back what there was before."""
    rig = Rig(tmp_path)
    for gpu in (0, 1):
        rig.driver.put(gpu, "limit", 650 * WATT)
        rig.driver.put(gpu, "kill", moment)
    with running(tmp_path, CONFIG.format(runtime_dir=rig.runtime_dir)):
        with rig.actuator() as actuator:
            wait_until(rig.knows_devices, "the actuator's report")
            rig.console.act("budget", "800")
            assert actuator.wait(30.0) == -signal.SIGKILL
        assert sorted(rig.limits()) == ([650.0, 650.0] if moment == 1 else [400.0, 650.0])
        rig.console.act("budget", "none")
        for gpu in (0, 1):
            rig.driver.put(gpu, "kill", 0)
        with rig.actuator():
            wait_until(lambda: rig.driver.limit(0) == rig.driver.limit(1) == 650.0, "the former limits")


def test_without_a_coordinator_the_budget_is_shared_evenly(tmp_path: Path) -> None:
    """An actuator that no coordinator answers shares the budget in its settings, and puts the former limits back."""
    rig = Rig(tmp_path)
    rig.driver.put(1, "limit", 600 * WATT)
    text = CONFIG.format(runtime_dir=rig.runtime_dir).replace("[power]", "[power]\nbudget_watts = 900.0")
    (tmp_path / "actorserve.toml").write_text(text)
    with rig.actuator() as actuator:
        rig.wait_for_limits(477.0, 422.0)
        actuator.terminate()
        assert actuator.wait(30.0) == 0
    assert rig.limits() == (700.0, 600.0)


def test_serving_goes_on_where_caps_are_denied(tmp_path: Path) -> None:
    """Without permission the actuator says so once, and the server has a row that tells it."""
    rig = Rig(tmp_path)
    for gpu in (0, 1):
        rig.driver.put(gpu, "set_error", NO_PERMISSION)
    with running(tmp_path, CONFIG.format(runtime_dir=rig.runtime_dir)), rig.actuator():
        wait_until(rig.knows_devices, "the actuator's report")
        rig.console.act("budget", "800")
        wait_until(
            lambda: {row["state"] for row in rig.console.rows("cap")} == {"cannot be set"}, "the state of devices"
        )
        assert rig.limits() == (700.0, 700.0)
    assert rig.log.read_text().count("Insufficient Permissions") == 2
