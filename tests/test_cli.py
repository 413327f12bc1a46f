"""The command line: real processes, and one clear line for every failure."""

import gc
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from actorserve.cli import main
from actorserve.processes import child
from actorserve.processes.console import ProgressDisplay, StartDisplay, usage_text
from actorserve.processes.status import Phase, Status
from actorserve.processes.supervision import AllReady, Progress, Restarting, Stopping

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 60.0


def one_line_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail. Returns the one line that it prints."""
    assert main(arguments) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("actorserve: ")
    return said.err


def test_output_whose_reader_has_ended_is_no_error() -> None:
    """``actorserve console help | head -1`` prints no traceback, whenever ``head`` ends."""
    command = [sys.executable, "-P", "-m", "actorserve", "console", "help"]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as out:
        done = subprocess.run(command, check=False, stdout=out, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Serving on a port in use ends with one line, at once."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"port {port} on 127.0.0.1 is in use" in one_line_of(["serve", "--port", port], capsys)


def test_a_missing_model_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Serving a model that does not exist ends with one line that names it."""
    model = str(tmp_path / "absent.gguf")
    assert model in one_line_of(["serve", "--port", "0", "--device", "cpu", "--model", model], capsys)


def test_a_truncated_model_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Serving a truncated file ends with one line that names it."""
    model = tmp_path / "short.gguf"
    model.write_bytes(b"GGUF\x03\x00\x00\x00")
    assert str(model) in one_line_of(["serve", "--port", "0", "--device", "cpu", "--model", str(model)], capsys)


@pytest.mark.parametrize("text", ["[http]\nprot = 1\n", "[http\n"])
def test_bad_settings_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    """Serving with a wrong settings file ends with one line that names it."""
    file = tmp_path / "settings.toml"
    file.write_text(text, encoding="utf-8")
    assert str(file) in one_line_of(["serve", "--config", str(file)], capsys)


def test_a_missing_settings_file_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Serving with a settings file that does not exist ends with one line that names it."""
    assert "/nowhere.toml" in one_line_of(["serve", "--config", "/nowhere.toml"], capsys)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for sockets in a subfolder. The paths of pytest's folders may be too long."""
    with tempfile.TemporaryDirectory(prefix="as-") as folder:
        yield Path(folder)


def serve_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "actorserve", "serve", "--port", "0", "--device", "cpu", *arguments]


@contextmanager
def serving(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server with the fake engine, and its URL. Killed at the end if it still runs."""
    with subprocess.Popen(
        serve_command("--engine", "fake"),
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            readable, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
            line = process.stdout.readline() if readable else ""
            ready = re.fullmatch(r"ready: \S+ at (http://127\.0\.0\.1:\d+)\n", line)
            if ready is None:
                process.kill()
                pytest.fail(f"no ready line: {line} {process.communicate()}")
            yield process, ready[1]
        finally:
            process.kill()


def children_of(process: subprocess.Popen[str]) -> dict[str, int]:
    """The process ids of a server's children, by name."""
    found = {}
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii")
    for pid in map(int, children.split()):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"--name" in arguments:
            found[arguments[arguments.index(b"--name") + 1].decode()] = pid
    return found


def wait_for_ends(descriptors: list[int]) -> None:
    """Wait until the processes behind these descriptors have ended."""
    for descriptor in descriptors:
        ended, _, _ = select.select([descriptor], [], [], DEADLINE_S)
        assert ended


@pytest.mark.e2e
@pytest.mark.model
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serving_and_ending_in_order(number: signal.Signals, short_folder: Path) -> None:
    """The ready line's URL answers; Ctrl-C or SIGTERM ends every child, exits with 0 and leaves no folder behind."""
    with serving(short_folder) as (process, url):
        with urllib.request.urlopen(f"{url}/v1/models", timeout=DEADLINE_S) as answer:
            assert json.load(answer)["data"]
        children = children_of(process)
        assert set(children) == {"coordinator", "gateway-0", "worker-0", "worker-1"}
        descriptors = [os.pidfd_open(pid) for pid in children.values()]
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == 0
        wait_for_ends(descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
    assert list(short_folder.iterdir()) == []


@pytest.mark.e2e
@pytest.mark.model
def test_children_do_not_outlive_a_killed_server(short_folder: Path) -> None:
    """kill -9 of the server ends all of its processes."""
    with serving(short_folder) as (process, _):
        descriptors = [os.pidfd_open(pid) for pid in children_of(process).values()]
        assert len(descriptors) == 4
        process.kill()
        wait_for_ends(descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def displays(terminal: bool) -> tuple[StartDisplay, StringIO, StringIO]:
    screen, out = StringIO(), StringIO()
    display = ProgressDisplay(Console(file=screen, force_terminal=terminal, width=100))
    return StartDisplay(display, "the usage\n", out), screen, out


def test_progress_is_sparse_lines_without_a_terminal() -> None:
    """Without a terminal a line is printed for a new text and for every quarter, not for every report."""
    start, screen, _ = displays(terminal=False)
    for percent in range(100):
        start.show(Progress("worker-0", Status(Phase.LOADING, "loading", percent / 100)))
    start.show(Progress("worker-0", Status(Phase.READY)))
    lines = screen.getvalue().splitlines()
    assert lines[0] == "worker-0: loading 0%"
    assert lines[-1] == "worker-0: ready"
    assert len(lines) == 5


def test_the_ready_text_goes_to_stdout_alone() -> None:
    """The text that a script reads is on stdout, once; progress and events are on stderr."""
    start, screen, out = displays(terminal=False)
    start.show(AllReady())
    start.show(Restarting("worker-0", "was killed by SIGKILL", 0.2))
    start.show(Progress("worker-0", Status(Phase.READY)))
    start.show(Stopping(4))
    assert out.getvalue() == "the usage\n"
    assert screen.getvalue().splitlines()[:2] == [
        "worker-0 was killed by SIGKILL; starting it again in 0.2 s",
        "worker-0 is ready again",
    ]


def test_bars_are_drawn_on_a_terminal() -> None:
    """On a terminal every process has a bar with its name."""
    screen = StringIO()
    with ProgressDisplay(Console(file=screen, force_terminal=True, width=100)) as display:
        display.update("worker-0", "loading [weights]", 0.5)
    assert "worker-0" in screen.getvalue()
    assert "loading [weights]" in screen.getvalue()


def test_the_curl_survives_a_shell() -> None:
    """The shown command sends valid JSON to the server, even if the model's name has quotes."""
    name = """it's "a" \\model"""
    text = usage_text("http://127.0.0.1:8000", name).split("\n\n", 1)[1].replace("curl", "printf '%s\\n'")
    said = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True).stdout.splitlines()
    body = json.loads(said[-1])
    assert body["model"] == name
    assert body["stream"] is True
    assert "http://127.0.0.1:8000/v1/chat/completions" in said


def test_a_process_looks_for_garbage_once_it_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child's program is imported without a search for garbage, and what it imported is left out of later ones."""
    states: list[tuple[str, bool, bool]] = []

    def note(what: str) -> None:
        states.append((what, gc.isenabled(), gc.get_freeze_count() > num_before))

    def load(name: str) -> types.SimpleNamespace:
        note("loads")
        return types.SimpleNamespace(main=None)

    def run(*_: object) -> int:
        note("runs")
        return 0

    num_before = gc.get_freeze_count()
    monkeypatch.setattr("importlib.import_module", load)
    monkeypatch.setattr(child, "run_child", run)
    try:
        assert main(["coordinator"]) == 0
    finally:
        gc.enable()
        gc.unfreeze()
    assert states == [("loads", False, False), ("runs", True, True)]
