"""A child reports to its parent, and dies with it."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from actorserve.processes import status
from actorserve.processes.status import Phase, Reporter, Status, decode_status, encode_status

DEADLINE_S = 20.0

statuses = st.builds(
    Status,
    phase=st.sampled_from(Phase),
    text=st.text().map(status.one_line),
    progress=st.none() | st.floats(0.0, 1.0),
)


@given(statuses)
def test_a_report_arrives_as_it_was_sent(report: Status) -> None:
    """Decoding what was encoded gives the same report, and it is one line, short enough to be written whole."""
    line = encode_status(report)
    assert decode_status(line) == report
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")


@given(st.binary() | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(lambda v: json.dumps(v).encode()))
def test_other_lines_are_no_reports(line: bytes) -> None:
    """A line that is not a report decodes to None, and never raises."""
    assert decode_status(line) is None


def test_an_out_of_range_progress_is_bounded() -> None:
    """Progress is cut to 0..1."""
    assert decode_status(b'{"status": "loading", "progress": 7}') == Status(Phase.LOADING, "", 1.0)


def test_nothing_is_reported_without_a_parent() -> None:
    """A reporter does nothing without the environment's variables."""
    reporter = status.attach({})
    reporter.loading("x", 0.5)
    reporter.ready()
    assert not reporter.is_heard


def test_a_parent_that_is_gone_is_no_error() -> None:
    """A report into a pipe without a reader is dropped."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        Reporter(writing).ready()
    finally:
        os.close(writing)


def test_a_failure_is_told_in_one_line() -> None:
    """Line breaks and excess length are removed from the text."""
    reading, writing = os.pipe()
    Reporter(writing).failed("first\n  second" + "x" * 5000)
    os.close(writing)
    with open(reading, "rb") as pipe:
        report = decode_status(pipe.read())
    assert report is not None
    assert report.text.startswith("first second")
    assert len(report.text) == status.MAX_TEXT_CHARS


PARENT = """
import os, subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-c",
     "from actorserve.processes import status; status.attach(); print('up', flush=True); input()"],
    env=os.environ | {"ACTORSERVE_PARENT_PID": str(os.getpid())}, stdin=subprocess.PIPE, start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def test_a_child_dies_with_a_killed_parent() -> None:
    """A parent that is killed with SIGKILL takes its child with it, although the child is in a session of its own."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent, parent.stdout:
        said = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
        assert "up" in said
        child_pid = int((said - {"up"}).pop())
        descriptor = os.pidfd_open(child_pid)
        try:
            parent.send_signal(signal.SIGKILL)
            # The descriptor is readable once the process has ended, whichever process reaps it.
            ended, _, _ = select.select([descriptor], [], [], DEADLINE_S)
            assert ended
        finally:
            os.close(descriptor)


def test_a_child_whose_parent_is_already_gone_ends() -> None:
    """A child whose parent died before ``die_with_parent`` was called ends at once."""
    with pytest.raises(SystemExit):
        status.die_with_parent(os.getppid() + 1)


GRANDPARENT = """
import subprocess, sys
from actorserve.processes.status import attach
assert attach().is_heard
own_child = "from actorserve.processes.status import attach; print(attach().is_heard)"
sys.exit(subprocess.run([sys.executable, "-c", own_child]).returncode)
"""


def test_a_grandchild_has_another_parent() -> None:
    """A process that a child starts does not die with the supervisor, and reports to no parent."""
    reading, writing = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", GRANDPARENT],
            env=os.environ | {status.PARENT_PID: str(os.getpid()), status.STATUS_FD: str(writing)},
            pass_fds=[writing],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )
    finally:
        os.close(reading)
        os.close(writing)
    assert (done.returncode, done.stdout) == (0, "False\n")


def test_attaching_keeps_the_pipe_from_grandchildren(tmp_path: Path) -> None:
    """A process that the child starts does not inherit the pipe, because the pipe's end would then come late."""
    file = tmp_path / "reports"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
    os.set_inheritable(descriptor, True)
    try:
        reporter = status.attach({status.STATUS_FD: str(descriptor)})
        assert reporter.is_heard
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)
