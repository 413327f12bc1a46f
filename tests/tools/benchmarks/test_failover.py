"""tools/bench failover: real coordinators are killed under streams."""

from pathlib import Path

import pytest

from actorserve.core.messages import Peer, Placed, Started
from actorserve.wire.journal import Entry
from tests.tools.benchmarks.run_bench import run_bench
from tools.benchmarks.cluster.failover import placed_after
from tools.benchmarks.common.errors import BenchError
from tools.figures.files import read_figures

_OLD, _NEW, _WORKER = Peer("coordinator", 1), Peer("coordinator", 2), Peer("worker-0", 1)


def test_a_request_without_a_place_counts_when_it_starts() -> None:
    """What the killed coordinator had placed does not count, and what the gateway places by itself does."""
    entries = [
        Entry(1.0, _OLD, Placed("before", 1, _WORKER)),
        Entry(2.1, _WORKER, Started("before", 1)),
        Entry(2.2, _OLD, Placed("on its way", 1, _WORKER)),
        Entry(2.3, _WORKER, Started("on its way", 1)),
        Entry(2.8, _WORKER, Started("by the gateway", 1)),
        Entry(3.5, _NEW, Placed("by another", 1, _WORKER)),
        Entry(3.6, _WORKER, Started("by another", 1)),
    ]
    assert placed_after(2.0, entries) == (2.8, 3.5)
    with pytest.raises(BenchError, match="no other coordinator"):
        placed_after(2.0, entries[:5])


@pytest.mark.e2e
@pytest.mark.model
@pytest.mark.parametrize("shape", ["two-hosts", "one-host"])
def test_a_takeover_is_measured(tmp_path: Path, shape: str, default_model_path: Path) -> None:
    """Each death has its time, and the streams' latencies before and after it."""
    file = tmp_path / "figures.json"
    load = ("--engine", "fake", "--streams", "2", "--tokens", "50", "--kills", "1", "--seconds", "1")
    done = run_bench("failover", "--model", str(default_model_path), "--shapes", shape, *load, "--json", str(file))
    assert done.returncode == 0, done.stderr
    (death,) = read_figures(file).details["deaths"][shape]
    assert 0.1 < death["placed_again_s"] < 20.0
    assert death["placed_again_s"] < death["by_coordinator_s"] + 5.0
    assert min(death["itl_before_s"], death["itl_after_s"]) > 0.0
