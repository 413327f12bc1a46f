"""``tools/simulate compare``: ratios with the spread over seeds, and errors for results that do not fit one another."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from actorserve.errors import SimulationError
from tests.sim.experiments import EXPERIMENT, write
from tools.simulation.__main__ import EXIT_UNUSABLE, main
from tools.simulation.arms import arms_of, medians_over_seeds
from tools.simulation.compare import compare, differing_keys, show_comparison
from tools.simulation.experiment import read_experiment
from tools.simulation.report import show
from tools.simulation.result_files import as_json, read_results

LATENCIES = ("ttft_s", "tpot_s", "tbt_s", "e2e_s", "per_token_s")


def run(value: float, rate: float | None = 2.0) -> dict[str, Any]:
    summary = dict.fromkeys(("mean", "max", "p50", "p90", "p95", "p99"), value)
    return {
        "rate_per_s": rate,
        "requests": {"arrived": 5, "completed": 5},
        "latency": dict.fromkeys(LATENCIES, summary),
        "throughput": {"output_tokens_per_s": 10.0 / value},
    }


def results(name: str, *values: float, arm: str = "fcfs", rate: float | None = 2.0, first_seed: int = 1) -> Any:
    """One arm, and a value of all its latencies for each seed."""
    cases: list[dict[str, Any]] = [
        {"variant": "", "arm": arm, "x": None, "seed": seed, "runs": [run(value, rate)], "held": {}}
        for seed, value in enumerate(values, first_seed)
    ]
    return {"name": name, "config": {"cluster": {"policy": name}}, "cases": cases}


def without_runs(name: str) -> Any:
    values = results(name, 1.0)
    values["cases"][0]["runs"] = []
    return values


def test_ratios_are_taken_seed_by_seed() -> None:
    """The ratio is the median over seeds of B over A, because both had the same requests; its spread is theirs."""
    [compared] = compare(results("a", 1.0, 2.0, 4.0), results("b", 2.0, 4.4, 8.2))
    ratio = compared.ratios["latency.ttft_s.p99"]
    assert ratio is not None
    assert (ratio.median, ratio.min, ratio.max, ratio.num_seeds) == pytest.approx((2.05, 2.0, 2.2, 3))
    assert ratio.exceeds_spread
    tokens = compared.ratios["throughput.output_tokens_per_s"]
    assert tokens is not None
    assert tokens.median == pytest.approx(1 / 2.05)


@pytest.mark.parametrize(("values", "exceeds"), [((1.3, 1.31, 1.3), True), ((1.3, 0.9, 1.1), False), ((1.3,), False)])
def test_a_difference_is_marked_if_it_exceeds_the_spread(values: tuple[float, ...], exceeds: bool) -> None:
    """A difference that varies over seeds as much as its size is not marked, nor is that of a single seed."""
    [compared] = compare(results("a", *[1.0] * len(values)), results("b", *values))
    ratio = compared.ratios["latency.e2e_s.p50"]
    assert ratio is not None
    assert ratio.exceeds_spread is exceeds


@pytest.mark.parametrize(
    ("b", "told"),
    [
        (
            results("b", 1.0, arm="srpt"),
            "'fcfs' of a is missing in b: expected the same variants and arms, but there are",
        ),
        (results("b", 1.0, rate=3.0), "'fcfs' ran at 2/s and at 3/s: expected a rate in both"),
        (results("b", 1.0, rate=None), "'fcfs' ran at 2/s and at the experiment's own rate: expected a rate in both"),
        (without_runs("b"), "'fcfs' ran at 2/s and not at all: expected a rate in both"),
        (results("b", 1.0, first_seed=7), "'fcfs' has the seeds 1 and 7: expected one in both"),
    ],
)
def test_results_that_do_not_fit_are_told(b: dict[str, Any], told: str) -> None:
    """Other arms, rates or seeds give one line that names them and says what was expected."""
    with pytest.raises(SimulationError) as caught:
        compare(results("a", 1.0), b)
    assert told in str(caught.value)


def test_settings_that_differ_are_named() -> None:
    """A comparison says what was changed between its sides, also in a table in a list or far behind in a long value."""
    a = {"seed": 1, "cluster": {"policy": "fcfs", "instances": 2}, "arms": [{"name": "x"}]}
    b = {"seed": 1, "cluster": {"policy": "srpt"}, "arms": [{"name": "x"}]}
    assert differing_keys(a, b) == ["cluster.instances: A 2, B none", "cluster.policy: A 'fcfs', B 'srpt'"]
    arms = [{"name": "x", "cluster": {"policy": "fcfs", "instances": 2}}]
    others = [{"name": "x", "cluster": {"policy": "srpt", "instances": 2}}]
    assert differing_keys({"arms": arms}, {"arms": others}) == ["arms.0.cluster.policy: A 'fcfs', B 'srpt'"]
    rates = [float(rate) for rate in range(1, 40)]
    [line] = differing_keys({"rates": [*rates, 40.0]}, {"rates": [*rates, 41.0]})
    assert line.endswith(", 39.0, 40.0], B " + line.partition(" A ")[2].partition("40.0]")[0] + "41.0]")
    many = differing_keys({str(key): 1 for key in range(40)}, {})
    assert many[-1] == "and 28 more keys differ"


def test_seeds_give_medians_and_their_spread(capsys: pytest.CaptureFixture[str]) -> None:
    """The table of runs has one entry for an arm, with the median over its seeds and the spread in brackets."""
    values = results("a", 0.4, 0.5, 0.52)
    [arm] = arms_of(values["cases"])
    assert arm.values(2.0, "latency.ttft_s.p50") == [0.4, 0.5, 0.52]
    assert medians_over_seeds(values["cases"])[0]["runs"][0]["latency"]["ttft_s"]["p50"] == 0.5
    show(values, Console(width=100))
    out = capsys.readouterr().out
    assert out.count("0.5 (24%)") == 6  # TTFT and E2E, at three percentiles
    assert out.count("500 (24%)") == 9  # in ms: TPOT, TBT and E2E per token
    assert "20 (29%) tokens/s" in out
    assert "TBT: the time between two tokens" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not JSON: line 1: Expecting value"),
        ("{", "not JSON: line 1: "),
        ("[" * 99999, "not JSON: "),
        ("[]", "it holds a list: expected the tables of a result file"),
        ('{"name": "a", "config": {}}', "cases is missing: expected a list of tables"),
        ('{"name": "a", "config": {}, "cases": []}', "cases is empty: expected at least one"),
    ],
)
def test_a_damaged_result_file_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    """A file that is no result gives one line that names it and what was expected."""
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(as_json(results("a", 1.0)), encoding="utf-8")
    bad.write_text(text, encoding="utf-8")
    assert main(["compare", str(good), str(bad)]) == EXIT_UNUSABLE
    err = capsys.readouterr().err
    assert err.startswith(f"simulate: {bad}: {told}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("cases", 0, "seed"), "one", "cases.0.seed is 'one': expected a whole number"),
        (("cases", 0, "runs"), 3, "cases.0.runs is 3: expected a list"),
        (("cases", 0, "runs", 0, "rate_per_s"), -1.0, "cases.0.runs.0.rate_per_s is -1.0: expected a number above 0"),
        (("cases", 0, "runs", 0, "latency", "ttft_s"), 5, "cases.0.runs.0.latency.ttft_s is 5: expected a table"),
        (
            ("cases", 0, "runs", 0, "latency", "ttft_s"),
            {"p50": 1.0, "p90": 2.0, "p99": float("nan")},
            "cases.0.runs.0.latency.ttft_s.p99 is nan: expected a finite number",
        ),
        (
            ("cases", 0, "runs", 0, "requests"),
            {"arrived": -1, "completed": 0},
            "requests.arrived is -1: expected at least",
        ),
    ],
)
def test_a_wrong_value_of_a_result_is_told(tmp_path: Path, path: tuple[Any, ...], value: Any, told: str) -> None:
    """A value that no run gives, or a missing one, is named by its key."""
    values = results("a", 1.0)
    inner = values
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    (tmp_path / "metrics.json").write_text(as_json(values), encoding="utf-8")
    with pytest.raises(SimulationError) as caught:
        read_results(tmp_path)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    del inner[path[-1]]
    (tmp_path / "metrics.json").write_text(as_json(values), encoding="utf-8")
    with pytest.raises(SimulationError, match=f"{path[-1]} is missing: expected"):
        read_results(tmp_path)


def test_two_experiments_are_run_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A result file is compared with an experiment, which is run first; every seed is a case of its own."""
    text = EXPERIMENT[: EXPERIMENT.index("[search]")].replace("cv = 2.0", "cv = 2.0\nrate_per_s = 0.3")
    file = write(
        tmp_path, text.replace("num_requests = 40", "num_requests = 10\nseeds = [1, 2]").replace("seed = 1\n", "")
    )
    assert main([str(file), "--out", str(tmp_path)]) == 0
    values = json.loads((tmp_path / "metrics.json").read_text())
    assert [case["seed"] for case in values["cases"]] == [1, 2]
    one, two = (case["runs"][0]["latency"]["ttft_s"]["mean"] for case in values["cases"])
    assert one != two
    capsys.readouterr()
    assert main(["compare", str(tmp_path), str(file), "--set", "cluster.policy=srpt", "--processes", "2"]) == 0
    out = capsys.readouterr().out
    assert "cluster.policy: A none, B 'srpt'" in out
    assert "Medians of 2 seeds" in out
    assert max(map(len, out.splitlines())) <= 100


def test_a_seed_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same seed twice would hide how much seeds differ, so it is refused."""
    assert main([str(write(tmp_path)), "--out", str(tmp_path), "--set", "seeds=[1,2,1]"]) == EXIT_UNUSABLE
    assert "seeds.2 is 1: expected another seed than those before it" in capsys.readouterr().err


@pytest.mark.parametrize("beside", ["", "arms", "variants"])
def test_a_seed_beside_seeds_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], beside: str) -> None:
    """A seed has no effect beside seeds, unless it is that of a file and --set replaces it."""
    given = f'{beside}=[{{name="x",seed=4}}]' if beside else "seed=4"
    text = EXPERIMENT[: EXPERIMENT.index("[search]")].replace("cv = 2.0", "cv = 2.0\nrate_per_s = 0.3")
    file = write(tmp_path, text)
    replaced = [str(file), "--out", str(tmp_path), "--set", "seeds=[1,2]"]
    assert main([*replaced, "--set", given]) == EXIT_UNUSABLE
    assert capsys.readouterr().err == f"simulate: {file}: seed is 4: expected none together with seeds\n"
    file.write_text("seeds = [1, 2]\n" + file.read_text())
    assert main([str(file), "--out", str(tmp_path)]) == EXIT_UNUSABLE
    assert "seed is 1: expected none together with seeds" in capsys.readouterr().err
    file.write_text(file.read_text().replace("seeds = [1, 2]\n", ""))
    assert len(read_experiment(file, {"seeds": [1, 2]}).cases) == 2


def test_figures_that_no_run_has_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """If no request of A ended, there is no ratio, and the table says so."""
    a, b = results("a", 1.0, 1.0), results("b", 1.0, 1.0)
    for case in a["cases"]:
        [only] = case["runs"]
        only |= {"latency": dict.fromkeys(LATENCIES), "throughput": {"output_tokens_per_s": 0.0}}
    show_comparison(a, b, Console(width=100))
    assert "No figure can be compared" in capsys.readouterr().out


def test_settings_for_two_results_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Results are not run again, so a setting would change nothing."""
    file = tmp_path / "metrics.json"
    file.write_text(as_json(results("a", 1.0)), encoding="utf-8")
    assert main(["compare", str(file), str(tmp_path), "--set", "seed=2"]) == EXIT_UNUSABLE
    assert capsys.readouterr().err == (
        "simulate: --set is given with two results, which it cannot change: expected an experiment (.toml)\n"
    )
