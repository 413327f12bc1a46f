"""tools/profile as a user runs it, on a model so small that its figures do not matter."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from actorserve.profile_files import load_profile
from tests.model_files.builders import write_folder
from tools.profiling import __main__ as command, engine
from tools.profiling.errors import ProfilingError

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 600.0  # long enough for a machine that others compute on as well


def run(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "tools.profiling", *arguments],
        cwd=ROOT,
        env=os.environ | {"ACTORSERVE_CACHE": str(cache), "COLUMNS": "150"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_an_engine_is_measured_shown_and_written(tmp_path: Path) -> None:
    """The profile is written to the folder where workers look for it, and tables show the measured times."""
    folder = write_folder(tmp_path / "tiny")
    arguments = ("--model", str(folder), "--load-format", "dummy", "--dtype", "float32", "--device", "cpu", "--quick")
    done = run(*arguments, "--threads", "1", cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "cache" / "profiles").glob("*.toml")
    profile = load_profile(file)
    assert (profile.dtype, profile.threads) == ("float32", 1)
    assert profile.min_iteration_s > 0.0
    for shown in ("prefill: tokens", "decode: requests", "swap: ", str(file), "pauses between iterations are 0 in"):
        assert shown in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "/nowhere"), "profile: model '/nowhere' does not exist"),
        (("--dtype", "int3"), "model.dtype"),
        (("--threads", "0"), "workers.threads"),
        (("--output", "/dev/null/a.toml"), "cannot write /dev/null/a.toml: Not a directory"),
        (("--output", "/dev"), "cannot write /dev: Is a directory"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    """A wrong model or option is an error without a traceback."""
    model = () if arguments[0] == "--model" else ("--model", str(write_folder(tmp_path / "tiny")))
    done = run(*model, *arguments, cache=tmp_path / "cache")
    assert done.returncode == command.EXIT_UNUSABLE
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_interrupt_ends_cleanly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C prints one line, and exits like an interrupted command."""

    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("tools.profiling.fit.run", interrupted)
    assert command.main(["fit", "a.csv"]) == command.EXIT_INTERRUPTED
    assert capsys.readouterr().err == "profile: interrupted; nothing was written\n"


@pytest.fixture
def handlers() -> Iterator[None]:
    """A signal that the command does not handle fails the test, and does not end it."""

    def unhandled(number: int, _: FrameType | None) -> None:
        raise AssertionError(f"signal {number} is not handled")

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, unhandled) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_once(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement cleans up also when its terminal closes, and signals that follow do not interrupt that."""
    num_cleaned_up = 0

    def interrupted(_: object) -> None:
        nonlocal num_cleaned_up
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(signal.SIGHUP)
            num_cleaned_up += 1

    monkeypatch.setattr(engine, "_settings", interrupted)
    assert command.main([]) == command.EXIT_INTERRUPTED
    assert num_cleaned_up == 1


@pytest.mark.usefixtures("handlers")
def test_nohup_outlasts_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the terminal's end is ignored, it stays ignored."""

    def measured(_: object) -> None:
        signal.raise_signal(signal.SIGHUP)
        raise ProfilingError("measured")

    monkeypatch.setattr(engine, "_settings", measured)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert command.main([]) == command.EXIT_UNUSABLE


def test_the_wrapper_can_be_run() -> None:
    """tools/profile is one of the commands in tools, and offers the fit as well as the measurement."""
    done = subprocess.run([ROOT / "tools" / "profile", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "--quick" in done.stdout
    assert "tools/profile fit" in done.stdout
