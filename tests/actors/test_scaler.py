"""Starting workers: the commands of every scaler, and the report if no worker starts."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from actorserve.actors.scaler import ChildScaler, CommandScaler, ScalerError, Starts, UnitScaler, make_scaler
from actorserve.core.messages import InstanceRole, StartFailed
from actorserve.errors import SettingsError
from actorserve.processes.status import Phase, Reporter, decode_status
from actorserve.settings import ScalingSettings, load_settings

DEADLINE_S = 30.0
UNIT = "worker@{number}.service"
SHOW = "show --property=Id,ActiveState,Job worker@0.service worker@1.service worker@2.service"

SYSTEMCTL = f"""#!{sys.executable}
import pathlib, sys
here = pathlib.Path(__file__).parent
with (here / "log").open("a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1] == "show":
    print((here / "shown").read_text(), end="")
sys.exit(int((here / sys.argv[1]).read_text()))
"""


class Systemctl:
    """A fake systemctl, first in PATH. It prints the text that a test gives, and logs its arguments."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        program = folder / "systemctl"
        program.write_text(SYSTEMCTL, encoding="utf-8")
        program.chmod(0o755)
        self.ends()

    def shows(self, *units: str) -> None:
        blocks = [f"Id=worker@{number}.service\n{facts}\n" for number, facts in enumerate(units)]
        (self._folder / "shown").write_text("\n".join(blocks), encoding="utf-8")

    def ends(self, *, show: int = 0, start: int = 0) -> None:
        """Set the exit statuses of its two commands."""
        (self._folder / "show").write_text(str(show), encoding="utf-8")
        (self._folder / "start").write_text(str(start), encoding="utf-8")

    @property
    def log(self) -> list[str]:
        return (self._folder / "log").read_text(encoding="utf-8").splitlines()


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Systemctl:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return Systemctl(tmp_path)


@pytest.mark.parametrize(
    ("units", "started"),
    [
        (["ActiveState=inactive"] * 3, 0),
        (["ActiveState=active", "ActiveState=failed", "ActiveState=inactive"], 1),
        (["ActiveState=activating", "ActiveState=deactivating", "ActiveState=inactive"], 2),
        (["Job=77\nActiveState=inactive", "ActiveState=inactive", "ActiveState=active"], 1),
    ],
)
async def test_the_first_free_unit_is_started(systemctl: Systemctl, units: list[str], started: int) -> None:
    """A unit is free if it neither runs nor is about to run. Its start is not waited for."""
    systemctl.shows(*units)
    await UnitScaler(UNIT, 3).start_worker(None)
    assert systemctl.log == [SHOW, f"start --no-block worker@{started}.service"]


async def test_if_all_units_run_none_is_started(systemctl: Systemctl) -> None:
    """The error says so, and nothing is started."""
    systemctl.shows("ActiveState=active", "ActiveState=reloading", "Job=1\nActiveState=inactive")
    with pytest.raises(ScalerError, match="all 3 units run or are about to run"):
        await UnitScaler(UNIT, 3).start_worker(None)
    assert systemctl.log == [SHOW]


@pytest.mark.parametrize("step", ["show", "start"])
async def test_a_systemctl_that_fails_is_an_error(systemctl: Systemctl, step: str) -> None:
    """The error names its exit status."""
    systemctl.shows(*["ActiveState=inactive"] * 3)
    systemctl.ends(**{step: 5})
    with pytest.raises(ScalerError, match="systemctl ended with exit status 5"):
        await UnitScaler(UNIT, 3).start_worker(None)


async def test_a_command_is_run_without_a_shell(tmp_path: Path) -> None:
    """The command gets its words unchanged, and the action in its environment."""
    noted = tmp_path / "noted"
    code = f"import os, sys; open({str(noted)!r}, 'w').write(os.environ['ACTORSERVE_ACTION'] + repr(sys.argv[1:]))"
    await CommandScaler([sys.executable, "-c", code, "a b", "$HOME"]).start_worker(None)
    assert noted.read_text(encoding="utf-8") == "start['a b', '$HOME']"


async def test_a_command_learns_the_role(tmp_path: Path) -> None:
    """It may start a prompt worker on another host than a token worker."""
    noted = tmp_path / "noted"
    code = f"import os; open({str(noted)!r}, 'w').write(os.environ['ACTORSERVE_ROLE'])"
    await CommandScaler([sys.executable, "-c", code]).start_worker(InstanceRole.PROMPT)
    assert noted.read_text(encoding="utf-8") == "prompt"


async def test_background_processes_of_a_command_are_not_waited_for(tmp_path: Path) -> None:
    """A worker that a command starts in the background keeps running, although it holds the command's output open."""
    lasting = tmp_path / "pid"
    sleeper = f"import os, time; open({str(lasting)!r}, 'w').write(str(os.getpid())); time.sleep(3600)"
    command = f"import subprocess, sys, os; subprocess.Popen([sys.executable, '-c', {sleeper!r}])"
    await CommandScaler([sys.executable, "-c", command], DEADLINE_S).start_worker(None)
    async with asyncio.timeout(DEADLINE_S):
        while not lasting.exists() or not lasting.read_text(encoding="utf-8"):  # noqa: ASYNC110 -- another process
            await asyncio.sleep(0.01)
    os.kill(int(lasting.read_text(encoding="utf-8")), 9)  # this fails if the process no longer lives


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ([sys.executable, "-c", "raise SystemExit(3)"], "ended with exit status 3"),
        ([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], "was killed by SIGKILL"),
        (["/nowhere/at/all"], r"cannot run /nowhere/at/all \(No such file or directory\)"),
    ],
)
async def test_a_command_that_fails_is_an_error(command: list[str], why: str) -> None:
    """The error says how the command ended."""
    with pytest.raises(ScalerError, match=why):
        await CommandScaler(command).start_worker(None)


async def test_a_command_that_does_not_end_is_killed(tmp_path: Path) -> None:
    """The command is killed when its time is over, and the error says so."""
    noted = tmp_path / "noted"
    with pytest.raises(ScalerError, match=r"sh has not ended in 1 s"):
        await CommandScaler(["sh", "-c", f"echo $$ > {noted}; exec sleep 3600"], 1.0).start_worker(None)
    with pytest.raises(ProcessLookupError):
        os.kill(int(noted.read_text(encoding="utf-8")), 0)


async def test_a_supervisor_is_asked_by_a_report() -> None:
    """A start sends one report to the supervisor; without a supervisor it is an error."""
    reading, writing = os.pipe()
    await ChildScaler(Reporter(writing)).start_worker(None)
    report = decode_status(os.read(reading, 1000))
    assert report is not None
    assert report.phase is Phase.WANTS_WORKER
    os.close(reading)
    os.close(writing)
    with pytest.raises(ScalerError, match="under no supervisor"):
        await ChildScaler(Reporter(None)).start_worker(None)


class _Scripted:
    """A scaler with the outcomes that a test gives it; an empty text is a success."""

    def __init__(self, *outcomes: str) -> None:
        self._outcomes = list(outcomes)
        self.done = asyncio.Event()
        self.num_at_once = 0

    async def start_worker(self, role: InstanceRole | None) -> None:
        self.num_at_once += 1
        assert self.num_at_once == 1
        await asyncio.sleep(0)
        self.num_at_once -= 1
        outcome = self._outcomes.pop(0)
        if not self._outcomes:
            self.done.set()
        if outcome:
            raise ScalerError(outcome)


async def test_failures_are_told_and_later_starts_are_tried(caplog: pytest.LogCaptureFixture) -> None:
    """Workers are started one after another; a failure gives a log line and a StartFailed, and starts go on."""
    told: list[StartFailed] = []
    scaler = _Scripted("no space", "", "no power", "")
    starts = Starts(scaler, told.append)
    running = asyncio.create_task(starts.run())
    for _ in range(4):
        starts.start_worker(None)
    async with asyncio.timeout(DEADLINE_S):
        await scaler.done.wait()
    running.cancel()
    await asyncio.wait([running])
    assert told == [StartFailed(), StartFailed()]
    assert [record.getMessage() for record in caplog.records] == [
        "no worker was started: no space",
        "no worker was started: no power",
    ]


async def test_a_bug_in_starting_comes_out() -> None:
    """An unexpected exception ends the process."""

    class Broken:
        async def start_worker(self, role: InstanceRole | None) -> None:
            raise KeyError("bug")

    starts = Starts(Broken(), lambda message: None)
    starts.start_worker(None)
    with pytest.raises(KeyError):
        await asyncio.wait_for(starts.run(), DEADLINE_S)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (ScalingSettings(), type(None)),
        (ScalingSettings(max_workers=2), ChildScaler),
        (ScalingSettings(max_workers=2, start_with="systemd"), UnitScaler),
        (ScalingSettings(max_workers=2, start_with="command", command="start 'a worker'"), CommandScaler),
    ],
)
def test_settings_choose_the_scaler(settings: ScalingSettings, expected: type) -> None:
    """Without an upper bound the number of workers is fixed, and there is no scaler."""
    assert type(make_scaler(settings, Reporter(None))) is expected


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"min_workers": 2}, "set max_workers as well"),
        ({"min_workers": 3, "max_workers": 2}, "min_workers is 3: expected at most 2"),
        ({"max_workers": 2, "start_with": "systemd", "unit": "worker.service"}, "expected {number} in it"),
        ({"max_workers": 2, "start_with": "command"}, "expected a setting `command` as well"),
        ({"max_workers": 2, "start_with": "command", "command": "a 'b"}, "No closing quotation"),
    ],
)
def test_settings_that_make_no_sense_are_refused(values: dict[str, object], why: str) -> None:
    """Such settings are refused at the start, in one line."""
    with pytest.raises(SettingsError, match=why):
        load_settings(None, {"scaling": values})
