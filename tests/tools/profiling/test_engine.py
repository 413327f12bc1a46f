"""tools/profile as a user runs it, on a model so small that its figures do not matter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actorserve.profile_files import load_profile
from tests.model_files.builders import write_folder
from tools.profiling import __main__ as command

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


def test_the_wrapper_can_be_run() -> None:
    """tools/profile is one of the commands in tools, and offers the fit as well as the measurement."""
    done = subprocess.run([ROOT / "tools" / "profile", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "--quick" in done.stdout
    assert "tools/profile fit" in done.stdout
