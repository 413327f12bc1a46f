"""tools/bench splitwise-sim: both simulators get the same requests, and their latencies are compared."""

import argparse
import csv
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from actorserve.sim.workload.traces import TraceRow, read_trace
from tests.tools.benchmarks.run_bench import run_bench
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.simulators import splitwise_sim, splitwise_sim_build
from tools.benchmarks.simulators.latencies import SimulatedRun
from tools.benchmarks.simulators.requests_file import draw, write_for_ours, write_for_theirs
from tools.benchmarks.simulators.splitwise_sim import BASELINES, EXPERIMENT, simulate, tables_of
from tools.benchmarks.simulators.their_run import read_run
from tools.figures.files import read_figures
from tools.simulation.experiment import read_experiment

TRACE = [TraceRow(float(number), 10 * number, number) for number in range(1, 50)]


def test_both_simulators_get_the_same_requests(tmp_path: Path) -> None:
    """The two files have the same times, up to the first one's, and the same lengths."""
    requests = draw(TRACE, 5.0, 20.0, 1, together=False)
    write_for_theirs(requests, tmp_path / "theirs.csv")
    write_for_ours(requests, tmp_path / "ours.csv")
    with (tmp_path / "theirs.csv").open(newline="", encoding="utf-8") as text:
        theirs = list(csv.DictReader(text))
    ours = read_trace(tmp_path / "ours.csv")
    assert len(theirs) == len(ours) == len(requests) > 50
    first_s = requests[0].at_s
    assert first_s is not None
    for their, our in zip(theirs, ours, strict=True):
        assert (int(their["prompt_size"]), int(their["token_size"])) == (our.prompt_tokens, our.output_tokens)
        assert our.at_s == pytest.approx(float(their["arrival_timestamp"]) - first_s, abs=1e-6)


def test_prompts_are_drawn_apart_from_outputs() -> None:
    """SplitwiseSim's draw mixes rows; ours keeps a row's prompt with its output, at the same times."""
    apart, together = (draw(TRACE, 5.0, 20.0, 1, together=together) for together in (False, True))
    assert [row.at_s for row in apart] == [row.at_s for row in together]
    assert all(row.prompt_tokens == 10 * row.output_tokens for row in together)
    assert sum(row.prompt_tokens == 10 * row.output_tokens for row in apart) < len(apart) / 4


@pytest.mark.parametrize("baseline", BASELINES.values(), ids=str)
def test_every_step_of_ours_runs(baseline: splitwise_sim.Baseline) -> None:
    """Each arm of the experiment serves all requests, on the machines of each Baseline."""
    cases = read_experiment(EXPERIMENT, {"cluster": {"groups": baseline.groups}}).cases
    assert [group.count for group in cases[0].config.cluster.groups] == [baseline.num_a100 + baseline.num_h100]
    requests = draw(TRACE, 20.0, 1.0, 1, together=False)
    for case in cases:
        assert len(simulate(case, requests).e2e_s) == len(requests)


def test_each_arm_sets_one_more_rule_right() -> None:
    """The arms differ from one to the next, so that no step is without effect."""
    tables = [case.config.cluster for case in read_experiment(EXPERIMENT, {}).cases]
    assert all(one != other for one, other in pairwise(tables))


def test_ratios_are_ours_over_theirs() -> None:
    """A run of twice the latencies has ratios of two, and speeds are requests over CPU time."""
    theirs = SimulatedRun([0.1, 0.2], [0.01, 0.02], [1.0, 2.0], 4.0)
    ours = SimulatedRun([0.2, 0.4], [0.02, 0.04], [2.0, 4.0], 0.5)
    latency, speed = tables_of("both", theirs, {"all": ours})
    assert [round(cell.median, 9) for cell in latency.rows[1].cells if cell is not None] == [2.0] * 9
    assert [cell.median for cell in speed.rows[0].cells if cell is not None] == [0.5, 4.0, 8.0]


def test_wrong_results_are_named(tmp_path: Path) -> None:
    """A file that is missing, damaged or too short is an error that names it."""
    file = tmp_path / "0.csv"
    with pytest.raises(BenchError, match="cannot read SplitwiseSim's results"):
        read_run(file, 1, 1.0)
    file.write_text("ttft_times,tbt_times\n1.0,2.0\n", encoding="utf-8")
    with pytest.raises(BenchError, match="cannot read SplitwiseSim's results"):
        read_run(file, 1, 1.0)
    file.write_text("ttft_times,tbt_times,response_times\n1.0,2.0,3.0\n", encoding="utf-8")
    assert read_run(file, 1, 1.0).percentiles() == [1.0] * 3 + [2.0] * 3 + [3.0] * 3
    with pytest.raises(BenchError, match="completed 1 of 2 requests"):
        read_run(file, 2, 1.0)


def test_a_peer_that_cannot_be_fetched_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says from where, and no half of it stays behind."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(BenchError, match="cannot fetch SplitwiseSim from /nowhere; with --source"):
        splitwise_sim_build.ensure_build(Console(quiet=True), "/nowhere")
    subprocess.run(["git", "init", "-q", str(tmp_path / "other")], check=True)
    with pytest.raises(BenchError, match="has no revision 8f99e7dc9b"):
        splitwise_sim_build.ensure_build(Console(quiet=True), str(tmp_path / "other"))
    assert not list((tmp_path / "actorserve" / "peers").iterdir())
    assert splitwise_sim_build.find_build() is None


def test_both_run_side_by_side(tmp_path: Path) -> None:
    """With all of SplitwiseSim's rules, single requests take the same time in both simulators, within 1 %."""
    if splitwise_sim_build.find_build() is None:
        pytest.skip(f"SplitwiseSim is not here: {splitwise_sim_build.ADVICE}")
    trace = tmp_path / "lengths.csv"
    trace.write_text("ContextTokens,GeneratedTokens\n300,20\n1500,40\n", encoding="utf-8")
    figures = tmp_path / "figures.json"
    given = ["--rate", "2", "--seconds", "10", "--arms", "1", "--out", str(tmp_path), "--json", str(figures)]
    run_bench("splitwise-sim", str(trace), *given)
    for latency in read_figures(figures).tables[::2]:
        for cell in latency.rows[1].cells:
            assert cell is not None
            assert cell.median == pytest.approx(1.0, abs=0.01)


def test_the_peer_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without SplitwiseSim nothing runs, and the error says how to get it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parser = argparse.ArgumentParser()
    splitwise_sim.add_arguments(parser)
    with pytest.raises(BenchError, match="tools/bench peers splitwise-sim fetches it"):
        splitwise_sim.run(parser.parse_args(["trace.csv"]))
