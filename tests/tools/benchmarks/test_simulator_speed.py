"""tools/bench simulator: the speed of each build, on one experiment."""

import json
from pathlib import Path

import pytest

from tests.tools.benchmarks.run_bench import run_bench
from tools.benchmarks.simulators import one_run
from tools.benchmarks.simulators.speed import EXPERIMENT, table_of

SMALL = "num_requests=50"


def test_a_run_tells_its_speed_and_its_results(capsys: pytest.CaptureFixture[str]) -> None:
    """The same seed gives the same digest, and another seed another one."""
    results = []
    for seed in (1, 1, 2):
        assert one_run.main(str(EXPERIMENT), SMALL, f"seed={seed}") == 0
        results.append(json.loads(capsys.readouterr().out))
    assert all(result["requests_per_cpu_s"] > 0 and result["memory_mib"] > 0 for result in results)
    first, same, other = (result["digest"] for result in results)
    assert first == same != other


def test_an_experiment_of_several_runs_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The error says that one run was expected."""
    assert one_run.main(str(EXPERIMENT), SMALL, "rates=[1.0, 2.0]") == 2
    assert "describes several runs; expected one" in capsys.readouterr().err


def test_a_bad_experiment_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the key."""
    assert one_run.main(str(EXPERIMENT), "nonsense=1") == 2
    assert "nonsense is unknown" in capsys.readouterr().err


def test_without_a_build_the_command_says_how_to_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured, because there would be nothing to compare."""
    monkeypatch.setenv("ACTORSERVE_CACHE", str(tmp_path))
    done = run_bench("simulator", "--rounds", "1", "--set", SMALL)
    assert done.returncode == 2
    assert "tools/compile does that" in done.stderr


def test_the_table_shows_medians() -> None:
    """One row for each build."""
    runs = {
        name: [
            {"requests_per_cpu_s": factor * value, "steady_requests_per_cpu_s": value, "memory_mib": 80.0}
            for value in (1.0, 5.0, 3.0)
        ]
        for name, factor in (("interpreted", 1.0), ("compiled", 2.0))
    }
    table = table_of("speed", runs)
    medians = {row.name: [cell and cell.median for cell in row.cells] for row in table.rows}
    assert medians == {"interpreted": [3.0, 3.0, 80.0], "compiled": [6.0, 3.0, 80.0]}
