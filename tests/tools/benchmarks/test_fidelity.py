"""tools/bench fidelity: records from journals, the simulated twin of a server, and the ratios of both."""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

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
    StepDone,
    Tokens,
)
from actorserve.core.timing.profile import Curve, Link, Profile
from actorserve.options import ClusterOptions, SchedulingOptions
from actorserve.profile_files import save_profile
from actorserve.settings import Settings, load_settings
from actorserve.sim.arrivals import arrivals
from actorserve.sim.config import RunConfig
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
    network_s,
    pools_of,
    records_of,
)
from tools.benchmarks.serving import fidelity
from tools.benchmarks.serving.fidelity import Overheads, compare, latencies_of, ratios, run_config, simulated_records
from tools.figures.files import read_figures
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


def small_run(*options: str, load_tokens_per_s: float = 400.0, settings: Settings | None = None) -> RunConfig:
    """A simulated worker whose pool is too small for its requests."""
    arguments = parsed(
        "--requests", "60", "--prompt-tokens", "uniform:20:90", "--output-tokens", "uniform:5:90", *options
    )
    pools = Pools(kv_tokens=384, host_kv_tokens=1024, tokens_per_block=16, bytes_per_token=BYTES_PER_TOKEN)
    return run_config(arguments, settings or Settings(), pools, Overheads(0.0005, 0.0002), load_tokens_per_s)


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
    assert records_of(entries, "x") == [Record(2.0, 3.0, 6.0, 4), Record(2.5, 4.0, 4.0, 1)]


@pytest.mark.parametrize("last", [tokens(("a", 1)), Finished("a", 1, FinishReason.ABORT, 1)])
def test_a_request_without_its_whole_answer_is_no_measurement(last: Message) -> None:
    """A request that is still running, or ended otherwise, is an error."""
    entries = told((2.0, opened("a", "x")), (3.0, tokens(("a", 0))), (4.0, last))
    with pytest.raises(BenchError, match="1 of 1 requests have no end"):
        records_of(entries, "x")


def test_a_message_takes_half_of_a_placement() -> None:
    """Placing takes one message each way; a second placement, after a failover, does not count."""
    placed = Placed("a", 1, WORKER)
    entries = told(
        (1.0, opened("a", "x")), (1.25, placed), (2.0, opened("w", "")), (4.0, Placed("w", 1, WORKER)), (9.0, placed)
    )
    assert network_s(entries, "x") == 0.125
    with pytest.raises(BenchError, match="no request was placed"):
        network_s(told((1.0, opened("a", "x"))), "x")


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
    """Pools and overheads are as measured; everything else is as in the settings."""
    cluster = small_run("--policy", "fcfs", "--max-tokens", "128").cluster
    assert (cluster.num_blocks, cluster.num_host_blocks, cluster.max_tokens) == (24, 64, 128)
    assert (cluster.network_s, cluster.step_overhead_s) == (0.0005, 0.0002)


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
        met = Simulation(config, FLAT).run().outcomes
        assert list(met.num_prompt) == [arrival.prompt_tokens for arrival in drawn]
        assert list(met.arrived_s) == [arrival.at_s for arrival in drawn]


def test_a_simulator_that_is_right_has_ratios_of_one() -> None:
    """A simulation that is compared with itself is equal, with preemptions and prefix hits on both sides."""
    config = small_run()
    results = Simulation(config, FLAT).run()
    compared = compare(config, FLAT, 0.9, simulated_records(results), REPORT)
    assert compared.simulated["ttft_s"]["p50"] > 0.005
    assert compared.ratios == {name: {"p50": 1.0, "p99": 1.0} for name in ("ttft_s", "tpot_s", "e2e_s")}
    assert compared.measured_counts == {"num_preemptions": 3, "num_swap_outs": 2, "num_tokens_found": 32}
    assert compared.simulated_counts["num_preemptions"] > 0
    assert compared.simulated_counts["num_tokens_found"] > 0


def test_ratios_are_simulated_over_measured() -> None:
    """A ratio above one means that the simulator is too slow; a request of one token has no TPOT."""
    simulated = latencies_of([Record(0.0, 3.0, 6.0, 4), Record(5.0, 8.0, 8.0, 1)])
    measured = latencies_of([Record(0.0, 2.0, 8.0, 4)])
    assert ratios(simulated, measured)["ttft_s"] == {"p50": 1.5, "p99": 1.5}
    assert ratios(simulated, measured)["tpot_s"] == {"p50": 0.5, "p99": 0.5}


@pytest.mark.e2e
@pytest.mark.model
def test_a_real_server_is_compared(tmp_path: Path, default_model_path: Path) -> None:
    """With the fake engine and its profile both sides have figures at each load, preempt, and find prefixes."""
    profile, figures = tmp_path / "flat.toml", tmp_path / "figures.json"
    save_profile(FLAT, profile)
    options = (
        *("--model", str(default_model_path), "--engine", "fake", "--dtype", "auto", "--profile", str(profile)),
        *("--kv-mib", "0.003", "--host-kv-mib", "0.02", "--max-tokens", "256", "--loads", "0.5,2"),
        *("--requests", "40", "--concurrency", "12", "--prompt-tokens", "uniform:40:90", "--output-tokens", "40"),
        *("--prefixes", "2", "--prefix-tokens", "32"),
    )
    done = run_bench("fidelity", *options, "--json", str(figures))
    assert done.returncode == 0, done.stderr
    assert "simulated / measured" in done.stdout
    loads = read_figures(figures).details["loads"]
    assert [load["load"] for load in loads] == [0.5, 2.0]
    assert all(set(load["ratios"]) == {"ttft_s", "tpot_s", "e2e_s"} for load in loads)
    for side in ("measured_counts", "simulated_counts"):
        assert loads[1][side]["num_preemptions"] > 0
        assert loads[1][side]["num_tokens_found"] > 0
