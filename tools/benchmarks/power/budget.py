"""``tools/bench power-budget``: from a budget at the console to power limits in the driver, with real processes.

A server with a coordinator, a gateway and workers with the fake engine runs beside ``actorserve power``, which loads a
driver's library whose eight GPUs are folders: the one of the tests, built from C. The time lasts from the console's
command until the last limit has changed in the driver, by the time of the file that holds it, and until a console reads
that all caps keep the budget. The console is open already; the time of one that is started for its command is told as
well.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from actorserve.console.outcome import as_objects
from actorserve.console.session import Session
from actorserve.core.messages import Outcome
from actorserve.wire.console import ConsoleClient, console_address
from tools.benchmarks.common.arguments import add_json, count
from tools.benchmarks.common.children import running, socket_folder
from tools.benchmarks.common.console import say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.common.paths import ROOT
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import machine_line, this_machine

TITLE: Final = "A budget at the console"
NUM_GPUS: Final = 8
_FULL_WATTS: Final = 700
_LEAST_WATTS: Final = 200
_SOURCE: Final = ROOT / "tests/workers/power/fake_nvml.c"
_CHANGES: Final = ((0.9, 0.75), (0.75, 0.5), (0.5, 0.9))
_WITHIN_S: Final = 10.0
_READY_S: Final = 120.0
_POLL_S: Final = 0.002
_CONFIG: Final = """
[model]
path = "{model}"
[workers]
engine = "fake"
count = 2
roles = ["prompt", "token"]
"""


@dataclass(frozen=True, slots=True)
class Change:
    """How long one change of the budget took: in the driver, at a console, and with a console's own start."""

    set_s: float
    read_back_s: float
    with_start_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="default", help="whose tokenizer the gateway takes (%(default)s)")
    parser.add_argument("--rounds", type=count, default=10, help="changes of each kind (%(default)s)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: BenchError."""
    console, machine = Console(), this_machine()
    say(console, machine_line(machine))
    load_before = os.getloadavg()[0]
    with _running(arguments.model) as rig:
        found: dict[tuple[float, float], list[Change]] = {change: [] for change in _CHANGES}
        rig.order(_CHANGES[0][0])
        for _ in range(arguments.rounds):
            for change in _CHANGES:
                found[change].append(rig.measure(*change))
    for change, times in found.items():
        longest = max(one.read_back_s for one in times)
        say(console, f"{_name(*change)}: all caps are read back within {longest:.3f} s")
    save_figures(arguments, [table_of(found)], {"load_average": [load_before, os.getloadavg()[0]]}, machine)
    return 0


def table_of(found: Mapping[tuple[float, float], list[Change]]) -> FigureTable:
    columns = (
        Column("until the last limit is set in the driver", "s", 3),
        Column("until all caps are read back at the console", "s", 3),
        Column("the same, with the start of the console's process", "s", 2),
    )
    rows = tuple(
        Row(
            _name(*change),
            (
                Figure.of([one.set_s for one in times]),
                Figure.of([one.read_back_s for one in times]),
                Figure.of([one.with_start_s for one in times]),
            ),
        )
        for change, times in found.items()
    )
    return FigureTable(TITLE, "change of the budget, of full power", columns, rows)


def _name(old: float, new: float) -> str:
    return f"from {old:.0%} to {new:.0%}"


class _Driver:
    """The library, and the folder of its GPUs. Each GPU's power limit is a file."""

    def __init__(self, folder: Path) -> None:
        self._gpus = folder / "gpus"
        self._library = folder / "libnvidia-ml.so.1"
        compiler = os.environ.get("CC", "cc")
        if shutil.which(compiler) is None:
            raise BenchError(f"there is no C compiler {compiler}, which builds the driver's library")
        words = [compiler, "-shared", "-fPIC", "-O1", "-o", str(self._library), str(_SOURCE)]
        built = subprocess.run(words, capture_output=True, text=True, check=False)
        if built.returncode != 0:
            raise BenchError(f"{compiler} cannot build {_SOURCE.name}: {built.stderr.strip()[:300]}")
        limits = {"least": _LEAST_WATTS, "most": _FULL_WATTS, "usual": _FULL_WATTS, "limit": _FULL_WATTS, "draw": 100}
        for index in range(NUM_GPUS):
            (self._gpus / str(index)).mkdir(parents=True)
            for name, watts in limits.items():
                (self._gpus / str(index) / name).write_text(f"{watts * 1000}\n")
        (self._gpus / "count").write_text(f"{NUM_GPUS}\n")

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": str(self._library.parent), "FAKE_NVML": str(self._gpus)}

    def last_set_s(self) -> float:
        """When the last limit was set, on the wall clock."""
        return max(file.stat().st_mtime_ns for file in self._gpus.glob("*/limit")) / 1e9


class _Rig:
    """A server with an actuator, and a console that is open."""

    def __init__(self, driver: _Driver, runtime_dir: Path, client: ConsoleClient) -> None:
        self._driver = driver
        self._runtime_dir = runtime_dir
        self._session = Session(client, _WITHIN_S)

    def measure(self, old: float, new: float) -> Change:
        """Change the budget twice: at the open console, and by a console that is started for it."""
        set_s, read_back_s = self._timed(new, self.order)
        self.order(old)
        self._wait_for(old)
        _, with_start_s = self._timed(new, self._start_console)
        return Change(set_s, read_back_s, with_start_s)

    def order(self, share: float) -> None:
        """Raises: BenchError."""
        answer = self._session.ask(self._session.command("budget", (f"{_watts(share)}",)))
        if answer is None or answer.outcome is not Outcome.DONE:
            raise BenchError(f"the budget was refused: {answer and answer.text}")

    def wait_ready(self) -> None:
        """Wait until the coordinator knows all GPUs. Raises: BenchError."""
        self.wait(lambda: len(self._caps()) == NUM_GPUS, _READY_S)

    def _timed(self, share: float, order: Callable[[float], None]) -> tuple[float, float]:
        began_s = time.time()
        order(share)
        self._wait_for(share)
        read_back_s = time.time() - began_s
        return self._driver.last_set_s() - began_s, read_back_s

    def _start_console(self, share: float) -> None:
        command = [sys.executable, "-P", "-m", "actorserve", "console", "--runtime-dir", str(self._runtime_dir)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        words = [*command, "budget", f"{_watts(share)}"]
        done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
        if done.returncode != 0:
            raise BenchError(f"the budget was refused: {done.stderr.strip()[:300]}")

    def _wait_for(self, share: float) -> None:
        """Wait until the caps that were read back take up the budget, whole watts aside, and keep it."""
        self.wait(lambda: _watts(share) - NUM_GPUS <= sum(self._caps()) <= _watts(share), _WITHIN_S)

    def _caps(self) -> list[float]:
        answer = self._session.read("cap")
        if answer is None or answer.outcome is not Outcome.DONE:
            return []
        return [float(row["cap_watts"]) for row in as_objects(answer)]

    @staticmethod
    def wait(holds: Callable[[], bool], within_s: float) -> None:
        until_s = time.monotonic() + within_s
        while not holds():
            if time.monotonic() > until_s:
                raise BenchError(f"the caps are not as ordered after {within_s:g} s")
            time.sleep(_POLL_S)


def _watts(share: float) -> int:
    return round(share * NUM_GPUS * _FULL_WATTS)


@contextmanager
def _running(model: str) -> Iterator[_Rig]:
    """The processes, which have met. Raises: BenchError."""
    with ExitStack() as stack:
        folder = stack.enter_context(socket_folder())
        driver = _Driver(folder)
        config = folder / "actorserve.toml"
        config.write_text(_CONFIG.format(model=model))
        runtime_dir = folder / "run"
        program = [sys.executable, "-P", "-m", "actorserve"]
        same = ["--config", str(config), "--runtime-dir", str(runtime_dir)]
        log = stack.enter_context((folder / "log").open("w"))
        stack.enter_context(running([*program, "serve", "--port", "0", *same], log))
        client = stack.enter_context(closing(ConsoleClient(console_address(runtime_dir))))
        rig = _Rig(driver, runtime_dir, client)
        rig.wait((runtime_dir / "coordinator.sock").exists, _READY_S)
        state = ["--state-dir", str(folder / "state")]
        stack.enter_context(running([*program, "power", *same, *state], log, driver.environment))
        rig.wait_ready()
        yield rig
