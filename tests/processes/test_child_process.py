"""One process of a child: its reports, its end, and signals before its start."""

import asyncio
import signal
import sys

from actorserve.processes.child_process import ChildProcess, Exit
from actorserve.processes.status import Phase, Status
from actorserve.processes.supervision import ChildSpec

DEADLINE_S = 30.0
REPORTS = """
import os, sys
from actorserve.processes.status import attach
report = attach()
report.loading("half", 0.5)
os.write(report._descriptor, b"no report\\n")
report.ready()
sys.exit(int(sys.argv[1]))
"""


def _child(code: str, *arguments: str) -> ChildProcess:
    return ChildProcess(ChildSpec("child", (sys.executable, "-c", code, *arguments), 0))


async def test_reports_and_the_end_are_told() -> None:
    """All reports come before the Exit, which says how the process ended. Other lines are skipped."""
    reports: list[Status] = []
    async with asyncio.timeout(DEADLINE_S):
        assert await _child(REPORTS, "3").run(reports.append) == Exit("ended with exit status 3", False)
        assert await _child(REPORTS, "0").run(lambda report: None) == Exit("ended with exit status 0", True)
    assert reports == [Status(Phase.LOADING, "half", 0.5), Status(Phase.READY)]


async def test_an_early_signal_reaches_the_process() -> None:
    """A signal that is sent before the process exists ends it as soon as it exists."""
    for number, orderly in ((signal.SIGTERM, True), (signal.SIGKILL, False)):
        process = _child("import signal\nwhile True: signal.pause()")
        process.send_signal(number)
        async with asyncio.timeout(DEADLINE_S):
            assert await process.run(lambda report: None) == Exit(f"was killed by {number.name}", orderly)


async def test_a_process_that_has_ended_gets_no_signal() -> None:
    """A late signal is ignored."""
    process = _child("")
    async with asyncio.timeout(DEADLINE_S):
        await process.run(lambda report: None)
    process.send_signal(signal.SIGKILL)
