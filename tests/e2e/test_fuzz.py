"""tools/fuzz for some seconds: every socket of real processes gets hostile input, and a broken server is told."""

import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.server import ROOT
from tools.figures.files import read_figures
from tools.fuzzing.rounds import SHARES
from tools.fuzzing.server import NUM_GATEWAYS, NUM_WORKERS, OVERS

pytestmark = [pytest.mark.e2e, pytest.mark.model]

DEADLINE_S = 600.0
NUM_PROCESSES = 1 + NUM_GATEWAYS + NUM_WORKERS


def command(folder: Path, *arguments: str) -> list[str]:
    failed = ("--failed", str(folder / "failed.txt"))
    return [sys.executable, "-P", "-m", "tools.fuzzing", *failed, *arguments]


def fuzz(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *arguments), cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def arguments_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


@pytest.mark.parametrize("over", OVERS)
def test_a_server_stands_hostile_input(over: str, tmp_path: Path, default_model_path: Path) -> None:
    """No process ends or grows, and the requests beside it get their tokens, whatever every socket gets."""
    figures = tmp_path / "figures.json"
    model = ("--model", str(default_model_path))
    done = fuzz(tmp_path, "--over", over, "--frames", "2000", "--json", str(figures), *model)
    assert done.returncode == 0, done.stdout + done.stderr
    frames = read_figures(figures).tables[0]
    sent = {row.name: row.cells[0].median for row in frames.rows if row.cells[0] is not None}
    names = set(SHARES) if over == "curve" else set(SHARES) - {"CURVE"}
    assert names < set(sent)
    assert min(sent[name] for name in names) > 0
    assert sent["all"] >= 2000


def test_a_server_that_breaks_is_told(tmp_path: Path, default_model_path: Path) -> None:
    """After kill -9 of a worker in the middle the exit status is 1, with the seed and the last frames."""
    arguments = ("--over", "ipc", "--frames", "1000000", "--seed", "77", "--model", str(default_model_path))
    with subprocess.Popen(
        command(tmp_path, *arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            while "round 1 of" not in (line := process.stdout.readline()):
                assert line, "it ended before the first round did"
            [supervisor] = children(process.pid)
            [worker] = [pid for pid in children(supervisor) if "worker-0" in arguments_of(pid)]
            os.kill(worker, signal.SIGKILL)
            _, errors = process.communicate(timeout=DEADLINE_S)
        finally:
            process.terminate()
    assert process.returncode == 1
    assert "worker-0" in errors
    assert "seed 77" in errors
    assert "seed 77" in (tmp_path / "failed.txt").read_text()


def test_a_run_that_is_killed_leaves_no_process(tmp_path: Path, default_model_path: Path) -> None:
    """kill -9 of the run ends its server, with all of the server's processes."""
    arguments = ("--over", "ipc", "--frames", "1000000", "--model", str(default_model_path))
    with subprocess.Popen(command(tmp_path, *arguments), cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        watched: list[int] = []
        try:
            assert process.stdout is not None
            while "round 1 of" not in (line := process.stdout.readline()):
                assert line, "it ended before the first round did"
            [supervisor] = children(process.pid)
            folder = Path(os.readlink(f"/proc/{supervisor}/cwd"))
            pids = [supervisor, *children(supervisor)]
            assert len(pids) == 1 + NUM_PROCESSES
            watched = [os.pidfd_open(pid) for pid in pids]
        finally:
            process.kill()
        try:
            process.wait(DEADLINE_S)
            for descriptor in watched:
                ended, _, _ = select.select([descriptor], [], [], 10.0)
                assert ended
        finally:
            for descriptor in watched:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                os.close(descriptor)
    shutil.rmtree(folder)
