"""tools/bench policies: loads as shares of saturation, the same requests for every policy, and the comparison."""

import argparse
from pathlib import Path

import pytest

from actorserve.errors import SettingsError
from actorserve.settings import load_settings
from actorserve.sim.workload.requests import Arrival
from tests.tools.benchmarks.run_bench import run_bench
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.serving import policies, under_load
from tools.benchmarks.serving.policies import Measured, compare
from tools.benchmarks.serving.statistics import Outcome
from tools.figures.files import read_figures

PAGE = """# TYPE made_total counter
made_total{engine="a"} 2.0
made_total{engine="b"} 3.5
made_total_of_others 100.0
"""


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    policies.add_arguments(parser)
    return parser.parse_args(arguments)


def outcome(sent_s: float, *chunks_s: float) -> Outcome:
    """An outcome with one token a chunk, which ends with the last chunk."""
    return Outcome(sent_s, list(chunks_s), chunks_s[-1], prompt_tokens=1, output_tokens=len(chunks_s))


def test_saturation_counts_tokens_until_the_last_request_was_sent() -> None:
    """Tokens after the last request was sent do not count, because the server runs dry; all earlier tokens do."""
    outcomes = [outcome(0.0, 1.0, 2.0, 3.0, 20.0), outcome(0.0, 1.0, 2.0), outcome(4.0, 30.0, 40.0)]
    assert under_load.saturated_tokens_per_s(outcomes) == 5 / 4.0


def test_saturation_takes_more_requests_than_run_at_once() -> None:
    """Sending all requests at once is an error, because the loop then never refills the server."""
    with pytest.raises(BenchError, match="--requests must be more than --concurrency"):
        under_load.saturated_tokens_per_s([outcome(0.0, 1.0), outcome(0.0, 1.0)])


def test_a_load_follows_the_drawn_lengths() -> None:
    """Whatever lengths a seed gives, answers sum up to the wanted tokens per second, and no load changes a length."""
    pairs = under_load.length_pairs(parsed("--max-tokens", "200"))
    slow, fast = (under_load.poisson_arrivals(pairs, 2000, rate, 7) for rate in (100.0, 300.0))
    for arrivals, rate in ((slow, 100.0), (fast, 300.0)):
        assert sum(arrival.output_tokens for arrival in arrivals) / arrivals[-1].at_s == pytest.approx(rate, rel=0.1)
    assert [arrival.output_tokens for arrival in slow] == [arrival.output_tokens for arrival in fast]
    assert max(arrival.prompt_tokens + arrival.output_tokens for arrival in slow) <= 200


def test_servers_get_the_same_requests_and_no_prompt_twice() -> None:
    """A seed gives the same prompts of the arrivals' lengths; another seed or another number gives others."""
    arrivals = [Arrival(0.0, 30, 4), Arrival(1.5, 30, 9)]
    jobs = under_load.make_jobs(arrivals, "a")
    assert jobs == under_load.make_jobs(arrivals, "a")
    assert [(job.at_s, len(job.body["prompt"]), job.body["max_tokens"]) for job in jobs] == [(0.0, 30, 4), (1.5, 30, 9)]
    assert all(job.body["min_tokens"] == job.body["max_tokens"] and job.body["ignore_eos"] for job in jobs)
    prompts = [job.body["prompt"] for job in (*jobs, *under_load.make_jobs(arrivals, "b"))]
    assert len({tuple(prompt) for prompt in prompts}) == 4


def test_prompts_of_one_prefix_begin_alike() -> None:
    """Requests of one prefix share its tokens, or all of a shorter prompt; the other tokens are their own."""
    arrivals = [
        Arrival(0.0, length, 1, prefix=prefix, prefix_tokens=20)
        for length, prefix in ((30, 1), (40, 1), (8, 1), (30, 2))
    ]
    one, two, short, other = (job.body["prompt"] for job in under_load.make_jobs(arrivals, "a", "salt"))
    assert one[:20] == two[:20] != other[:20]
    assert one[20:30] != two[20:30]
    assert short == one[:8]
    assert {job.body["cache_salt"] for job in under_load.make_jobs(arrivals, "a", "salt")} == {"salt"}


def test_a_metric_is_summed_over_instances() -> None:
    """A metric whose name begins alike does not count; a missing metric is an error that names it."""
    assert under_load.sum_of(PAGE, "made_total") == 5.5
    with pytest.raises(BenchError, match="no metric lost_total"):
        under_load.sum_of(PAGE, "lost_total")


def test_a_server_gets_the_settings_as_a_file(tmp_path: Path) -> None:
    """The settings come back from the file that the server is started with."""
    values = under_load.overrides(parsed("--kv-mib", "1.5", "--host-kv-mib", "0", "--threads", "3"), "fcfs", "reactive")
    spec = under_load.server_spec("fcfs:reactive", values, tmp_path)
    settings = load_settings(Path(spec.command[spec.command.index("--config") + 1]))
    workers = settings.workers
    assert (workers.policy, workers.swap, workers.threads, workers.count) == ("fcfs", "reactive", 3, 1)
    assert (workers.kv_cache_bytes, workers.host_kv_bytes) == (3 * 2**19, 0)


def test_a_misspelt_policy_is_one_line_before_anything_starts() -> None:
    """The error names the setting and its possible values."""
    with pytest.raises(SettingsError, match=r"workers.policy: .*skip_join_mlfq"):
        under_load.overrides(parsed(), "fifo", "proactive")


@pytest.mark.parametrize(
    ("option", "value"), [("--policies", "fcfs,fcfs"), ("--policies", "fcfs,"), ("--loads", "0.5,-1")]
)
def test_odd_options_are_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A policy that is named twice, an empty name, and a load below zero are refused."""
    with pytest.raises(SystemExit):
        parsed(option, value)
    assert option in capsys.readouterr().err


def test_counts_are_a_servers_growth_during_the_rounds() -> None:
    """Counters grow over several rounds, each from the value at its beginning."""
    measured, metric = Measured(), "vllm:num_preemptions_total"
    before = dict.fromkeys((metric for _, metric in policies._COUNTERS.values()), 10.0)
    for after in (13.0, 14.0):
        measured.add([outcome(0.0, 1.0)], before, before | {metric: after})
    assert measured.counts == {"preemptions": 7.0, "swap_outs": 0.0, "swap_blocked_s": 0.0}
    assert len(measured.outcomes) == 2


def test_the_first_policy_is_compared_with_each_other_one() -> None:
    """A ratio below one means that the first policy is faster."""
    met = {"a": [outcome(0.0, 1.0, 2.0)], "b": [outcome(0.0, 2.0, 8.0)], "c": [outcome(0.0, 1.0, 1.0)]}
    result = compare(0.5, 12.0, {arm: Measured(outcomes, {}) for arm, outcomes in met.items()})
    assert set(result.ratios) == {"a / b", "a / c"}
    assert {name: statistics["mean"] for name, statistics in result.ratios["a / b"].items()} == {
        "per_token_s": 0.25,
        "ttft_s": 0.5,
        "e2e_s": 0.25,
    }
    assert result.latency["b"]["per_token_s"]["mean"] == 4.0


@pytest.mark.e2e
@pytest.mark.model
def test_real_servers_are_measured(tmp_path: Path, default_model_path: Path) -> None:
    """With the fake engine and too small a pool every policy is measured at each load, and preemptions are counted."""
    figures = tmp_path / "figures.json"
    options = (
        *(
            "--model",
            str(default_model_path),
            "--engine",
            "fake",
            "--dtype",
            "auto",
            "--policies",
            "skip_join_mlfq,fcfs",
        ),
        *("--kv-mib", "0.003", "--host-kv-mib", "0.02", "--max-tokens", "256", "--rounds", "1", "--loads", "0.5,2"),
        *("--requests", "24", "--concurrency", "12", "--prompt-tokens", "uniform:8:64", "--output-tokens", "40"),
    )
    done = run_bench("policies", *options, "--json", str(figures))
    assert done.returncode == 0, done.stderr
    written = read_figures(figures)
    assert [table.title for table in written.tables] == [policies.load_title(load) for load in (0.5, 2.0)]
    told = written.details
    assert [load["load"] for load in told["loads"]] == [0.5, 2.0]
    for load in told["loads"]:
        assert set(load["latency"]) == set(load["counts"]) == {"skip_join_mlfq", "fcfs"}
        assert set(load["ratios"]) == {"skip_join_mlfq / fcfs"}
    assert told["loads"][1]["counts"]["skip_join_mlfq"]["preemptions"] > 0
    assert "latency per token, s, P95" in done.stdout
