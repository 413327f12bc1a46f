"""tools/bench failover: real coordinators are killed under streams."""

from pathlib import Path

import pytest

from tests.tools.benchmarks.run_bench import run_bench
from tools.figures.files import read_figures

pytestmark = [pytest.mark.e2e, pytest.mark.model]


@pytest.mark.parametrize("shape", ["two-hosts", "one-host"])
def test_a_takeover_is_measured(tmp_path: Path, shape: str, default_model_path: Path) -> None:
    """Each death has its time, and the streams' latencies before and after it."""
    file = tmp_path / "figures.json"
    load = ("--engine", "fake", "--streams", "2", "--tokens", "50", "--kills", "1", "--seconds", "1")
    done = run_bench("failover", "--model", str(default_model_path), "--shapes", shape, *load, "--json", str(file))
    assert done.returncode == 0, done.stderr
    (death,) = read_figures(file).details["deaths"][shape]
    assert 0.1 < death["placed_again_s"] < 20.0
    assert min(death["itl_before_s"], death["itl_after_s"]) > 0.0
