"""tools/bench splitwise-sim-runs: our simulator beside runs of SplitwiseSim that are on file."""

import csv
import sys
from pathlib import Path

import pytest

from actorserve.sim.workload.traces import TraceRow
from tests.tools.benchmarks.run_bench import run_bench
from tools.benchmarks.simulators import their_run
from tools.benchmarks.simulators.latencies import SimulatedRun
from tools.benchmarks.simulators.splitwise_sim_build import SplitwiseSimBuild
from tools.benchmarks.simulators.splitwise_sim_runs import EXPERIMENT, MACHINES, read_runs, table_of
from tools.figures.files import read_figures
from tools.simulation.experiment import read_experiment


def test_the_runs_on_file_are_whole() -> None:
    """Each design of each run has a latency for each column, and percentiles of one latency never fall."""
    on_file = read_runs()
    assert {run.rate_per_s for run in on_file.runs.values()} == {30.0, 70.0}
    for run in on_file.runs.values():
        for latencies in run.latencies.values():
            found = dict(zip(on_file.columns, latencies, strict=True))
            assert found["TTFT P50"] <= found["TTFT P90"] <= found["TTFT P99"] < found["E2E P99"]
            assert found["TBT P50"] <= found["TBT P99"]


def test_every_arm_has_runs() -> None:
    """Each design of the experiment is on file, so that none is simulated in vain."""
    arms = {case.arm for case in read_experiment(EXPERIMENT, {}).cases}
    for run in read_runs().runs.values():
        assert arms <= set(run.latencies)


def test_both_simulators_have_the_same_machines() -> None:
    """Each arm has as many machines of each kind as SplitwiseSim's cluster, and as many for prompts."""
    for case in read_experiment(EXPERIMENT, {}).cases:
        machines, counts = MACHINES[case.arm], dict.fromkeys(("a100", "h100", "h100-capped"), 0)
        for group in case.config.cluster.groups:
            counts[group.profile.removeprefix("bloom-176b-")] += group.count
        assert list(counts.values()) == [machines.num_a100, machines.num_h100, machines.num_capped]
        num_prompt = [group.count for group in case.config.cluster.groups if str(group.role) == "prompt"]
        assert num_prompt == ([] if machines.num_prompt is None else [machines.num_prompt])


def test_its_command_line_says_which_machines_compute_prompts() -> None:
    """A cluster of one kind is split by numbers, one of two kinds by kind, and one that is not split by neither."""
    assert MACHINES["baseline-a100"].options()[-1] == "applications.0.scheduler=token_jsq"
    assert "start_state.prompt.num_instances=45" in MACHINES["aa"].options()
    assert "start_state.token.num_instances=25" in MACHINES["aa"].options()
    assert "start_state.split_type=heterogeneous" not in MACHINES["aa"].options()
    assert "start_state.split_type=heterogeneous" in MACHINES["ha"].options()
    assert {"cluster=hhcap_half_half", "start_state=splitwise_hhcap", "cluster.servers.0.count=21"} <= set(
        MACHINES["hhcap"].options()
    )


def test_ours_is_divided_by_theirs() -> None:
    """A row of ratios follows each row on file, column by column."""
    ours = SimulatedRun([2.0], [0.5], [6.0], 1.0)
    table = table_of("code-70", ("TTFT P50", "TBT P99"), {"baseline-a100": (1.0, 2.0)}, {"baseline-a100": ours})
    theirs, ratios = table.rows
    assert [cell and cell.median for cell in theirs.cells] == [1000.0, 2000.0]
    assert [cell and cell.median for cell in ratios.cells] == [2.0, 0.25]


_QUEUE = """\
class MixedPoolScheduler:
    prompt_max_pending_batch_tokens = 2048

    def is_queue_long(self, instance, task):
        return False
"""

_RUN = """\
import sys
from pathlib import Path
from types import SimpleNamespace

from scheduler import MixedPoolScheduler

folder = Path(sys.argv[-1].split("=")[1].strip("'")) / "detailed"
folder.mkdir(parents=True)
queues = [(0, 3000), (1000, 1000), (1000, 1049)]
rows = ""
for pending, size in queues:
    instance, task = SimpleNamespace(sched_pending_tokens=pending), SimpleNamespace(tokens_per_iteration=size)
    rows += f"{float(MixedPoolScheduler().is_queue_long(instance, task))},0,0\\n"
(folder / "0.csv").write_text("ttft_times,tbt_times,response_times\\n" + rows)
"""


@pytest.mark.parametrize(("running_counts", "long"), [(False, [0.0, 0.0, 0.0]), (True, [0.0, 0.0, 1.0])])
def test_its_queues_can_count_prompts_that_run(tmp_path: Path, running_counts: bool, long: list[float]) -> None:
    """Only then is a queue long whose one prompt is computed already, and with which the next one passes the limit."""
    build = SplitwiseSimBuild(tmp_path)
    build.python.parent.mkdir(parents=True)
    build.python.symlink_to(sys.executable)
    build.sources.mkdir()
    (build.sources / "scheduler.py").write_text(_QUEUE, encoding="utf-8")
    (build.sources / "run.py").write_text(_RUN, encoding="utf-8")
    requests = [TraceRow(float(number), 10, 1) for number in range(3)]
    run = their_run.simulate(build, requests, MACHINES["aa"], tmp_path / "out", running_counts=running_counts)
    assert run.ttft_s == long


def test_the_bench_runs(tmp_path: Path) -> None:
    """The command simulates a design and writes its figures."""
    trace = tmp_path / "trace.csv"
    with trace.open("w", newline="", encoding="utf-8") as text:
        writer = csv.writer(text)
        writer.writerow(("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
        writer.writerows((f"2023-11-16 18:17:{second:02}", 100, 2) for second in range(60))
    options = ["--load", "conversation-30", "--designs", "baseline-h100", "--json", str(tmp_path / "figures.json")]
    assert run_bench("splitwise-sim-runs", str(trace), *options).returncode == 0
    [table] = read_figures(tmp_path / "figures.json").tables
    assert len(table.rows) == 2
    assert table.rows[1].cells[0] is not None
    assert table.rows[1].cells[0].median == pytest.approx(0.0493 / 0.160, rel=0.2)
