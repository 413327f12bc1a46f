"""tools/bench gateway and clients: real gateways stream to real sockets, and the figures are written."""

from pathlib import Path

import pytest

from actorserve.core.effects import Send
from actorserve.core.messages import Peer, Release, RequestSpec, Resend, SamplingParams, Start, Tick, Tokens
from tests.tools.benchmarks.run_bench import run_bench
from tools.benchmarks.gateway.paced_worker import Options, PacedCore
from tools.benchmarks.gateway.step_clock import NUM_STEPS, StepClock
from tools.figures.files import read_figures


@pytest.mark.model
def test_events_of_all_servers_are_counted(tmp_path: Path, default_model_path: Path) -> None:
    """All servers stream events, of which the latencies are known, and the table has their ratios."""
    file = tmp_path / "figures.json"
    options = ("--streams", "2", "--rounds", "1", "--seconds", "0.5", "--model", str(default_model_path))
    done = run_bench("gateway", *options, "--json", str(file))
    assert done.returncode == 0, done.stderr
    figures = read_figures(file)
    assert [point["server"] for point in figures.details["points"]] == ["gateway", "two gateways", "bare hypercorn"]
    for point in figures.details["points"]:
        assert point["busy"]["num_events"] > 0
        assert point["busy"]["cpu_s"] > 0
        assert 0 < point["half"]["p50_s"] <= point["half"]["p99_s"] < 60
    assert figures.tables[0].columns[1].unit == "x"
    assert [row.cells[1] is None for row in figures.tables[0].rows] == [False, False, True]


@pytest.mark.model
def test_every_crowd_is_measured(tmp_path: Path, default_model_path: Path) -> None:
    """The neighbours have latencies without and with each crowd, and an idle stream takes memory."""
    file = tmp_path / "figures.json"
    crowds = ("--connections", "20", "--streams", "50", "--not-reading", "3", "--refused", "1")
    options = ("--rounds", "1", "--seconds", "0.5", "--model", str(default_model_path))
    done = run_bench("clients", *crowds, *options, "--json", str(file))
    assert done.returncode == 0, done.stderr
    figures = read_figures(file)
    assert len(figures.details["points"]) == 3
    for point in figures.details["points"]:
        assert 0 < point["p50_s"] <= point["p99_s"]
        assert 0 < point["alone_p50_s"] <= point["alone_p99_s"]


def test_a_step_clock_is_shared(tmp_path: Path) -> None:
    """A reader finds when the latest step of a number was sent."""
    StepClock.create(tmp_path / "clock")
    writer, reader = StepClock(tmp_path / "clock"), StepClock(tmp_path / "clock")
    writer.note(7, 1.5)
    assert reader.sent_s(7) == 1.5
    writer.note(7 + 2048, 2.5)
    assert reader.sent_s(7) == 2.5


def test_a_paced_worker_outlives_lost_messages(tmp_path: Path) -> None:
    """A late release of an old epoch does not end a stream, and tokens that were lost are sent again."""
    StepClock.create(tmp_path / "clock")
    options = Options(1, "", "m", 9, [5] * NUM_STEPS, "", 1.0, 100.0, 1.0, 1.0)
    worker, gateway = PacedCore(options, 0, StepClock(tmp_path / "clock")), Peer("gateway-0", 1)

    def step(now: float) -> list[tuple[int, int]]:
        """The epochs and positions of the tokens of the next step."""
        sent = [effect.message for effect in worker.handle(Tick(), now) if isinstance(effect, Send)]
        tokens = [message for message in sent if isinstance(message, Tokens)]
        return [row for message in tokens for row in zip(message.epochs, message.positions, strict=True)]

    spec = RequestSpec("a", (1,), SamplingParams(seed=0, max_tokens=100))
    worker.handle(Start(1, spec), 0.0, gateway)
    assert [step(1.0), step(2.0)] == [[(1, 0)], [(1, 1)]]
    worker.handle(Resend("a", 1, 1), 2.0, gateway)
    assert step(3.0) == [(1, 1)]
    worker.handle(Start(2, spec), 3.0, gateway)
    worker.handle(Release("a", 1), 3.0, gateway)
    assert step(4.0) == [(2, 0)]
    worker.handle(Release("a", 2), 4.0, gateway)
    assert step(5.0) == []
