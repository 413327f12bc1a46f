"""tools/bench fidelity: records from journals, the simulated twins of a server, and the ratios of both."""

import argparse
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from rich.console import Console

from actorserve.core.instance.quiet_steps import Ending
from actorserve.core.instance.steps import Step, Steps
from actorserve.core.messages import (
    Finished,
    FinishReason,
    LoadReport,
    Message,
    Open,
    Peer,
    Placed,
    RequestSpec,
    SamplingParams,
    Start,
    StepDone,
    Tokens,
)
from actorserve.core.timing.profile import Curve, Link, Profile
from actorserve.errors import ProfileError
from actorserve.options import ClusterOptions, SchedulingOptions
from actorserve.profile_files import drift_of, save_profile
from actorserve.settings import Settings, load_settings
from actorserve.sim.arrivals import arrivals
from actorserve.sim.config import RunConfig
from actorserve.sim.engine_model import EngineModel, Flight
from actorserve.sim.results import Counts
from actorserve.sim.simulation import Simulation
from actorserve.wire.journal import Entry, write_entry
from tests.tools.benchmarks.run_bench import run_bench
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.journals import (
    Pools,
    Record,
    between_steps_s,
    entries_of,
    last_report,
    message_s,
    pools_of,
    records_of,
)
from tools.benchmarks.fidelity import fidelity, server_runs
from tools.benchmarks.fidelity.recorded_engine import RecordedTimes
from tools.benchmarks.fidelity.server_runs import LoadedRun
from tools.benchmarks.fidelity.simulated import Twin, records_in, with_recorded_times
from tools.benchmarks.fidelity.tables import compare, kind_ratios, latencies_of, latency_table, profile_table
from tools.figures.figure import Figure
from tools.figures.files import read_figures
from tools.journals.steps import Kind, RecordedStep, Recording, Work
from workers.engines.fake_engine import BYTES_PER_TOKEN

WORKER = Peer("worker-0", 1)
REPORT = LoadReport(
    sequence=1,
    num_running=0,
    num_waiting=0,
    kv_total_bytes=64 * 1600,
    kv_used_bytes=0,
    virtual_usage_bytes=0,
    bytes_per_block=1600,
    tokens_per_block=16,
    num_preemptions=3,
    num_tokens_found=32,
    host_total_bytes=8 * 1600,
    num_swap_outs=2,
)
FLAT = Profile(
    name="flat",
    model="SmolLM2-135M-Instruct",
    hardware="none",
    dtype="none",
    prefill=Curve((1.0, 2.0), (0.005, 0.005)),
    prefill_context_s=0.0,
    decode=Curve((1.0, 2.0), (0.005, 0.005)),
    decode_context=Curve((0.0, 1.0), (0.0, 0.0)),
    swap=Link(0.0, 1e9),
    transfer=Link(0.0, 1e9),
    kv_bytes_per_token=BYTES_PER_TOKEN,
)

SLOPED = replace(
    FLAT, prefill=Curve((1.0, 2.0), (0.01, 0.02)), decode=Curve((1.0, 2.0), (0.01, 0.02)), name="10 ms for each row"
)


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    fidelity.add_arguments(parser)
    return parser.parse_args(arguments)


def told(*entries: tuple[float, Message]) -> Iterator[Entry]:
    return (Entry(now, WORKER, message) for now, message in entries)


def opened(request_id: str, salt: str) -> Open:
    return Open(RequestSpec(request_id, (1, 2), SamplingParams(seed=0, max_tokens=4), cache_salt=salt))


def tokens(*rows: tuple[str, int]) -> Tokens:
    request_ids, positions = zip(*rows, strict=True)
    return Tokens(request_ids, (1,) * len(rows), positions, (0,) * len(rows))


UNUSUAL: dict[str, dict[str, Any]] = {
    "workers": {
        "policy": "fcfs",
        "promote_after_s": 2.5,
        "promote_after_by_priority_s": {"1": 7.0},
        "min_share": 0.25,
        "headroom_tokens_by_priority": {"-1": 8},
        "max_queue_per_instance": 5,
    },
    "cluster": {"late_binding": False, "dispatch": "round_robin", "round_s": 0.75, "load_report_s": 0.5},
}


SMALL = ("--requests", "60", "--prompt-tokens", "uniform:20:90", "--output-tokens", "uniform:5:90")


def small_run(*options: str, load_tokens_per_s: float = 400.0, settings: Settings | None = None) -> RunConfig:
    """A simulated worker whose pool is too small for its requests."""
    arguments = parsed(*SMALL, *options)
    return twin_of(arguments, settings).config(load_tokens_per_s)


def twin_of(arguments: argparse.Namespace, settings: Settings | None = None) -> Twin:
    pools = Pools(kv_tokens=384, host_kv_tokens=1024, tokens_per_block=16, bytes_per_token=BYTES_PER_TOKEN)
    return Twin(arguments, settings or Settings(), pools, 0.0005)


def test_a_request_is_measured_at_the_gateways_core() -> None:
    """A record runs from a request's Open to its first token and its end; requests with another salt have no record."""
    entries = told(
        (1.0, opened("warm", "")),
        (2.0, opened("a", "x")),
        (2.5, opened("b", "x")),
        (3.0, tokens(("warm", 0), ("a", 0))),
        (4.0, tokens(("a", 1), ("b", 0))),
        (4.0, Finished("b", 1, FinishReason.LENGTH, 1)),
        (5.5, tokens(("a", 2), ("a", 3))),
        (6.0, Finished("a", 1, FinishReason.LENGTH, 4)),
        (7.0, Finished("a", 1, FinishReason.LENGTH, 4)),
    )
    assert records_of(entries, "x") == [Record(2.0, 3.0, 6.0, 2, 4), Record(2.5, 4.0, 4.0, 2, 1)]


@pytest.mark.parametrize("last", [tokens(("a", 1)), Finished("a", 1, FinishReason.ABORT, 1)])
def test_a_request_without_its_whole_answer_is_no_measurement(last: Message) -> None:
    """A request that is still running, or ended otherwise, is an error."""
    entries = told((2.0, opened("a", "x")), (3.0, tokens(("a", 0))), (4.0, last))
    with pytest.raises(BenchError, match="1 of 1 requests have no end"):
        records_of(entries, "x")


def test_a_message_takes_the_time_between_two_cores() -> None:
    """The time is that from a placement to the start at the worker, and from a token's iteration to the gateway."""
    start = Start(1, RequestSpec("a", (1, 2), SamplingParams(seed=0, max_tokens=4)))
    gateway = [*told((1.0, Placed("a", 1, WORKER)), (2.5, tokens(("a", 0))), (9.0, tokens(("a", 1))))]
    worker = [*told((1.125, start), (2.25, StepDone(1, 0.5, ("a",), (0,), (7,))), (5.0, start))]
    assert message_s(gateway, worker) == (0.125 + 0.25) / 2
    with pytest.raises(BenchError, match="no request that started"):
        message_s(gateway[:1], [])


def test_pauses_of_a_worker_do_not_count_between_iterations() -> None:
    """The gap is the time between the ends of two iterations without the second iteration's duration."""
    ends = [2.0 + 0.5 * number for number in range(20)]
    ends += [ends[-1] + 100.0]  # after an idle time
    entries = told(*((at_s, StepDone(number, 0.375, (), (), ())) for number, at_s in enumerate(ends)))
    assert between_steps_s(entries) == pytest.approx(0.125)
    with pytest.raises(BenchError, match="no two iterations"):
        between_steps_s(told((1.0, StepDone(1, 0.5, (), (), ()))))


def test_pools_are_the_workers_own_figures() -> None:
    """Sizes in tokens come from the last report of the journal."""
    entries = told((1.0, replace(REPORT, kv_total_bytes=1600)), (2.0, REPORT), (3.0, tokens(("a", 0))))
    assert pools_of(last_report(entries)) == Pools(1024, 128, 16, 100)
    with pytest.raises(BenchError, match="reported no load"):
        last_report(told((1.0, tokens(("a", 0)))))


def test_journals_of_all_incarnations_are_read(tmp_path: Path) -> None:
    """The journals follow each other; a process without a journal is an error that names it."""
    for incarnation in (1, 2):
        with (tmp_path / f"gateway-0-{incarnation}.journal").open("wb") as file:
            write_entry(file, Entry(float(incarnation), WORKER, REPORT))
    assert [entry.now for entry in entries_of(tmp_path, "gateway-0")] == [1.0, 2.0]
    with pytest.raises(BenchError, match="worker-0 left no journal"):
        list(entries_of(tmp_path, "worker-0"))


def test_the_simulated_cluster_is_the_measured_one() -> None:
    """Pools and the time of a message are as measured; everything else is as in the settings."""
    cluster = small_run("--policy", "fcfs", "--max-tokens", "128").cluster
    (group,) = cluster.all_groups
    assert (cluster.num_blocks(group), cluster.num_host_blocks(group), cluster.max_tokens) == (24, 64, 128)
    assert cluster.network_s == 0.0005


@pytest.mark.parametrize("settings", [Settings(), load_settings(None, UNUSUAL)])
def test_the_simulated_cluster_has_the_options_of_the_measured_one(settings: Settings) -> None:
    """Every option that a server and a simulated cluster share is as in the settings, except the measured pools."""
    cluster = small_run(settings=settings).cluster
    for name in SchedulingOptions.model_fields:
        if name != "tokens_per_block":
            assert getattr(cluster, name) == getattr(settings.workers, name), name
    for name in ClusterOptions.model_fields:
        assert getattr(cluster, name) == getattr(settings.cluster, name), name


def test_both_sides_get_the_same_arrivals() -> None:
    """A load sets the rate alone: the server gets the same requests that the simulator draws."""
    slow, fast = (list(arrivals(small_run(load_tokens_per_s=rate), ())) for rate in (100.0, 400.0))
    assert [replace(arrival, at_s=0.0) for arrival in slow] == [replace(arrival, at_s=0.0) for arrival in fast]
    mean = fmean(arrival.output_tokens for arrival in slow)
    for rate, drawn in ((100.0, slow), (400.0, fast)):
        config = small_run(load_tokens_per_s=rate)
        assert config.arrivals.rate_per_s == pytest.approx(rate / mean)
        met = Simulation(config, [FLAT]).run().outcomes
        assert list(met.num_prompt) == [arrival.prompt_tokens for arrival in drawn]
        assert list(met.arrived_s) == [arrival.at_s for arrival in drawn]


class Recorder(EngineModel):
    """An engine of which a test gets the iterations, with times that no profile predicts."""

    def __init__(self, steps: list[RecordedStep], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._steps = steps

    def begin(
        self,
        step: Step,
        num_quiet: int,
        planned_s: float,
        before: Flight | None,
        core_steps: Steps,
        endings: Sequence[Ending] = (),
    ) -> Flight:
        assert num_quiet == 0  # prompts share prefixes
        flight = super().begin(step, 0, planned_s, before, core_steps)
        work = Work(tuple(flight.chunks), flight.num_decodes, flight.num_context_tokens - flight.num_decodes)
        num_tokens = work.num_decodes + sum(num_fed for num_fed, _ in work.chunks)
        free_s = 0.0 if before is None else before.ends[0][0]
        slower = 2.0 if 1.0 < planned_s < 2.0 else 1.0
        duration_s = slower * (0.004 + 0.0003 * work.num_rows + 0.00005 * num_tokens)
        ends_s = max(planned_s, free_s) + duration_s + 0.001
        flight.ends[:] = [(ends_s, duration_s)]
        before_s = self._steps[-1].ended_s if self._steps else -math.inf
        self._steps.append(RecordedStep(planned_s, before_s, ends_s, duration_s, work))
        return flight


def recorded_run(load_tokens_per_s: float) -> LoadedRun:
    steps: list[RecordedStep] = []
    config = small_run(load_tokens_per_s=load_tokens_per_s)
    results = Simulation(config, [FLAT], make_engine=partial(Recorder, steps)).run()
    report = replace(REPORT, num_preemptions=results.counts.num_preemptions)
    return LoadedRun(records_in(results), 0.0005, Recording(FLAT, steps), report)


@pytest.mark.parametrize("load_tokens_per_s", [400.0, 600.0])
def test_recorded_times_give_the_recorded_schedule(load_tokens_per_s: float) -> None:
    """A run's arrivals and the times of its iterations give its latencies again, with preemptions and prefix hits, also
    if its engine was slow for a while, and took other times than its profile says.
    """
    run = recorded_run(load_tokens_per_s)
    results = with_recorded_times(twin_of(parsed(*SMALL)), run)
    compared = compare(run.records, run.report, records_in(results), results.counts)
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        for percentile in ("p50", "p99"):
            assert compared.ratio(name, percentile) == pytest.approx(1.0, abs=0.05), (name, percentile)
    assert compared.simulated_counts["num_preemptions"] > 0
    assert compared.simulated_counts["num_tokens_found"] > 0
    blind = Simulation(twin_of(parsed(*SMALL)).config(load_tokens_per_s), [FLAT]).run()
    assert latencies_of(records_in(blind))["e2e_s"]["p50"] < 0.9 * compared.measured["e2e_s"]["p50"]


def test_an_iteration_takes_the_time_of_one_like_it() -> None:
    """The recorded iteration has prefills and was planned ahead if the simulated one is so. It is alike first, and near
    in time second. The profile corrects for the remaining difference.
    """
    decode, large, prefill = Work((), 1, 10), Work((), 9, 10), Work(((30, 0),), 1, 10)
    steps = [
        RecordedStep(10.0, -math.inf, 10.11, 0.1, decode),
        RecordedStep(11.0, 10.11, 11.22, 0.2, decode),
        RecordedStep(11.1, 11.22, 11.52, 0.3, large),
        RecordedStep(11.3, 11.52, 12.0, 0.4, prefill),
        RecordedStep(20.0, 11.52, 20.53, 0.5, decode),
    ]
    times = RecordedTimes(steps, SLOPED, began_s=9.0)
    assert times.times_of(decode, 1.0, was_ahead=False) == pytest.approx((0.01, 0.1))
    assert times.times_of(decode, 1.9, was_ahead=False) == pytest.approx((0.02, 0.2))
    assert times.times_of(decode, 99.0, was_ahead=False) == pytest.approx((0.03, 0.5))
    assert times.times_of(large, 1.0, was_ahead=True)[1] == pytest.approx(0.3)
    assert times.times_of(decode, 1.0, was_ahead=True)[1] == pytest.approx(0.3 * 0.01 / 0.09)
    assert times.times_of(prefill, 1.0, was_ahead=False)[1] == pytest.approx(0.4)
    assert RecordedTimes([], SLOPED, 0.0).times_of(large, 0.0, was_ahead=True) == pytest.approx((0.0, 0.09))


def test_each_kind_of_iteration_is_compared() -> None:
    """Predicted over actual time is the median of a kind's iterations; a chunk behind context is a kind of its own."""
    works = {
        Kind.DECODE: Work((), 4, 100),
        Kind.PREFILL: Work(((30, 0), (20, 0)), 0, 0),
        Kind.MIXED: Work(((30, 0),), 2, 50),
        Kind.BEHIND: Work(((30, 0), (30, 16)), 2, 50),
    }
    steps = [
        RecordedStep(0.0, 0.0, 9.0, slower * work.predicted_s(SLOPED), work)
        for work in works.values()
        for slower in (0.5, 2.0, 40.0)
    ]
    twice = replace(SLOPED, prefill=Curve((1.0, 2.0), (0.02, 0.04)), decode=Curve((1.0, 2.0), (0.02, 0.04)))
    ratios = kind_ratios(SLOPED, twice, steps)
    assert ratios.keys() == works.keys()
    for ratio in ratios.values():
        assert (ratio.measured, ratio.calibrated, ratio.num_steps) == pytest.approx((0.5, 1.0, 3))
    table = profile_table([ratios, kind_ratios(SLOPED, twice, steps[:3])])
    assert [(row.name, row.cells[2].rounds if row.cells[2] else 0) for row in table.rows] == [
        ("decodes only", 2),
        ("prefills only", 1),
        ("prefills with decodes", 1),
        ("chunks behind context", 1),
    ]


def test_ratios_are_simulated_over_measured() -> None:
    """A ratio above one means that the simulator is too slow; a request of one token has no TPOT."""
    simulated = [Record(0.0, 3.0, 6.0, 9, 4), Record(5.0, 8.0, 8.0, 9, 1)]
    compared = compare([Record(0.0, 2.0, 8.0, 9, 4)], REPORT, simulated, Counts())
    assert (compared.ratio("ttft_s", "p50"), compared.ratio("tpot_s", "p99")) == (1.5, 0.5)
    assert dict(compared.measured_counts) == {"num_preemptions": 3, "num_tokens_found": 32}
    (row,) = latency_table("a title", {0.9: [compared] * 3}).rows
    assert row.name == "90 % of saturation"
    assert row.cells[0] == Figure(1.5, 1.5, 1.5, 3)


def test_a_profile_of_a_machine_that_drifted_is_refused(tmp_path: Path) -> None:
    """A named profile ends the command before a server starts, with a line that names the file and the key."""
    file = tmp_path / "mine.toml"
    save_profile(replace(FLAT, errors=(("drift", 0.4),)), file)
    with pytest.raises(ProfileError, match=r"mine.toml: errors.drift is 0.4: expected at most 0.1"):
        fidelity.run(parsed("--profile", str(file)))


@pytest.mark.parametrize(("drifts", "num_measured"), [([0.0], 1), ([0.3, 0.05], 2), ([0.3, 0.3, 0.3], 3)])
def test_a_profile_is_measured_again_if_the_machine_drifted(
    drifts: list[float], num_measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first steady profile is taken, and without one in three measurements the benchmark ends."""
    left = list(drifts)
    monkeypatch.setattr(server_runs, "_measured_profile", lambda *_: replace(FLAT, errors=(("drift", left.pop(0)),)))
    console = Console(file=io.StringIO())
    if drifts[-1] > 0.1:
        with pytest.raises(ProfileError, match="drift"):
            server_runs.fresh_profile({}, Path("x.toml"), console)
    else:
        assert drift_of(server_runs.fresh_profile({}, Path("x.toml"), console)) <= 0.1
    assert len(drifts) - len(left) == num_measured


@pytest.mark.e2e
@pytest.mark.model
def test_a_real_server_is_compared(tmp_path: Path, default_model_path: Path) -> None:
    """With the fake engine and its profile all three tables have figures at each load, with preemptions and prefixes on
    both sides.
    """
    profile, figures = tmp_path / "flat.toml", tmp_path / "figures.json"
    save_profile(FLAT, profile)
    options = (
        *("--model", str(default_model_path), "--engine", "fake", "--dtype", "auto", "--profile", str(profile)),
        *("--kv-mib", "0.003", "--host-kv-mib", "0.02", "--max-tokens", "256", "--loads", "0.5,2", "--rounds", "2"),
        *("--requests", "40", "--concurrency", "12", "--prompt-tokens", "uniform:40:90", "--output-tokens", "40"),
        *("--prefixes", "2", "--prefix-tokens", "32"),
    )
    done = run_bench("fidelity", *options, "--json", str(figures))
    assert done.returncode == 0, done.stderr
    found = read_figures(figures)
    schedule, kinds, end_to_end = found.tables
    for table in (schedule, end_to_end):
        assert [row.name for row in table.rows] == ["50 % of saturation", "200 % of saturation"]
        assert all(cell is not None and cell.rounds == 2 for row in table.rows for cell in row.cells)
        assert table.title in " ".join(done.stdout.split())
        for cell in table.rows[1].cells[6:]:
            assert cell is not None
            assert cell.median > 0
    assert kinds.rows[0].name == "decodes only"
