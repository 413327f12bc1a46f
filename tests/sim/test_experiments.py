"""``tools/simulate``: experiments are read strictly, run in parallel, and written as JSON and plots."""

import json
from pathlib import Path

import pytest

from actorserve.errors import ActorserveError
from tests.sim.experiments import EXPERIMENT, write
from tools.simulation.__main__ import EXIT_UNUSABLE, main, parse_override
from tools.simulation.experiment import Goal, Search, read_experiment
from tools.simulation.figures import figure_of
from tools.simulation.machines import ROOT
from tools.simulation.runner import edge_held, highest_held, holds, run_experiment, run_once


def test_an_experiment_gives_the_same_bytes_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Arms run in parallel over the same rates; JSON is the same each time, and there is a plot."""
    file = write(tmp_path)
    for name in ("one", "two"):
        assert main([str(file), "--out", str(tmp_path / name), "--processes", "2"]) == 0
    one, two = ((tmp_path / name / "metrics.json").read_bytes() for name in ("one", "two"))
    assert one == two
    assert (tmp_path / "one" / "small.png").read_bytes().startswith(b"\x89PNG")
    fcfs, srpt = json.loads(one)["cases"]
    goal = "per_token_s.mean <= 3"
    assert fcfs["held"][goal] in (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
    assert srpt["held"][goal] >= fcfs["held"][goal]
    for case in (fcfs, srpt):
        rates = [run["rate_per_s"] for run in case["runs"]]
        assert rates == sorted(rates)
        assert fcfs["held"][goal] in rates  # at which all arms are compared
        assert all(run["requests"]["completed"] == 40 for run in case["runs"])
        means = {run["rate_per_s"]: run["latency"]["per_token_s"]["mean"] for run in case["runs"]}
        assert means[case["held"][goal]] <= 3.0
        above = [mean for rate, mean in means.items() if rate > case["held"][goal]]
        assert above
        assert min(above) > 3.0
    shown = capsys.readouterr()
    assert "held at" in shown.out
    num_runs = sum(len(case["runs"]) for case in (fcfs, srpt))
    assert shown.err.count(": done\n") == 2 * num_runs  # also of the runs at the rate of another arm
    assert shown.err.startswith("simulating 2 cases on 1 instance\n")


def test_arms_may_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--arm`` runs the named arms alone, and an arm that is not in the file is told with the known ones."""
    file = write(tmp_path, EXPERIMENT.replace('compare_at = "fcfs"\n', ""))
    assert main([str(file), "--out", str(tmp_path), "--arm", "srpt"]) == 0
    assert [case["arm"] for case in json.loads((tmp_path / "metrics.json").read_text())["cases"]] == ["srpt"]
    assert main([str(file), "--out", str(tmp_path), "--arm", "lifo"]) == EXIT_UNUSABLE
    assert "--arm lifo: expected one of fcfs, srpt" in capsys.readouterr().err


def test_variants_on_an_axis_make_one_plot(tmp_path: Path) -> None:
    """Variants with an x share a plot; one run that has nothing to compare has one, too; ``--set`` changes the file."""
    text = EXPERIMENT[: EXPERIMENT.index("[search]")] + "\n".join(
        f'[[variants]]\nname = "{x}"\nx = {x}\nlengths.ratio = {x}.0\narrivals.rate_per_s = 0.3' for x in (1, 4)
    )
    file = write(tmp_path, text)
    assert main([str(file), "--out", str(tmp_path), "--set", "num_requests=7", "--set", "cluster.policy=srpt"]) == 0
    values = json.loads((tmp_path / "metrics.json").read_text())
    assert [case["x"] for case in values["cases"]] == [1, 4]
    assert [case["runs"][0]["requests"]["arrived"] for case in values["cases"]] == [7, 7]
    assert values["config"]["cluster"]["policy"] == "srpt"
    assert (tmp_path / "small.png").exists()
    single = write(
        tmp_path, text[: text.index("[[variants]]")].replace('process = "gamma"', 'process="gamma"\nrate_per_s=1')
    )
    assert main([str(single), "--out", str(tmp_path / "single")]) == 0
    assert (tmp_path / "single" / "small.png").exists()


def test_named_figures_are_shown_and_plotted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An experiment's own figures make a table, with ratios to the last arm, and one plot: of bars where there is no
    axis, of lines by a figure where it says so.
    """
    text = EXPERIMENT[: EXPERIMENT.index("[search]")] + EXPERIMENT[EXPERIMENT.index("[[arms]]") :]
    named = 'figures = ["latency.ttft_s.p99", "migration.gap_s.mean"]\n' + text.replace(
        "cv = 2.0", "cv = 2.0\nrate_per_s = 0.3"
    )
    file = write(tmp_path, named)
    assert main([str(file), "--out", str(tmp_path / "bars"), "--processes", "2"]) == 0
    shown = capsys.readouterr().out
    fcfs, srpt = (case["runs"][0] for case in json.loads((tmp_path / "bars" / "metrics.json").read_text())["cases"])
    ttft_s = [run["latency"]["ttft_s"]["p99"] for run in (fcfs, srpt)]
    assert f"{ttft_s[0]:.3g} ({ttft_s[0] / ttft_s[1]:.3g}x)" in shown
    assert figure_of(fcfs, "latency.ttft_s.p99") == ttft_s[0]
    assert figure_of(fcfs, "migration.gap_s.mean") is None
    assert "none" in shown
    assert main([str(file), "--out", str(tmp_path / "lines"), "--set", "plot_by=instances.mean"]) == 0
    plots = [(tmp_path / folder / "small.png").read_bytes() for folder in ("bars", "lines")]
    assert plots[0] != plots[1]


WRONG = [
    ('profile = "tiny.toml"', "", "cluster.profile is missing: expected the name of a shipped profile, or a file"),
    ('profile = "tiny.toml"', "profile = 3", "cluster.profile is 3: expected the name of a shipped profile"),
    ('profile = "tiny.toml"', 'profile = "gpt"', "cluster.profile is 'gpt': expected a .toml file, or one of "),
    ('profile = "tiny.toml"', 'profile = "no.toml"', "cluster.profile: there is no file "),
    ("kv_tokens = 120", "kv_token = 120", "cluster.kv_token"),
    ("kv_tokens = 120", "kv_tokens = 0", "cluster.kv_tokens is 0: expected at least 1"),
    ("kv_tokens = 120", "kv_tokens = 3", "cluster.kv_tokens is 3: expected at least a block of 4"),
    ("kv_tokens = 120", "kv_tokens = nan", "cluster.kv_tokens"),
    (
        'policy = "fcfs"',
        'policy = "lifo"',
        "fcfs: cluster.policy is 'lifo': expected 'skip_join_mlfq', 'shortest_expected'",
    ),
    ("cv = 2.0", "", "arrivals.cv is missing: expected a number above 0"),
    ("cv = 2.0", "cv = -1.0", "arrivals.cv is -1.0: expected at least 0.01"),
    ('process = "gamma"', 'process = "zipf"', "arrivals.process is 'zipf': expected 'poisson', 'gamma'"),
    ('process = "gamma"', 'process = "trace"', "arrivals.cv is 2.0: expected only with process = 'gamma'"),
    (
        "[arrivals]\n",
        "[arrivals]\nrate_per_s = 2.0\n[arrival]\n",
        "arrival is unknown: expected arms, arrivals, cluster",
    ),
    ("num_requests = 40", "", "duration_s is missing: expected it, or num_requests"),
    ("num_requests = 40", "num_requests = 40\nduration = 3", "duration is unknown: expected arms, arrivals, cluster"),
    (
        'prompt = "uniform:1:30"',
        'prompt = "uniform:30:1"',
        "lengths.prompt: length distribution 'uniform:30:1': MIN is above MAX",
    ),
    ('prompt = "uniform:1:30"', 'like = "bert"', "lengths.like is 'bert': expected sharegpt, alpaca"),
    ('prompt = "uniform:1:30"', 'like = "alpaca"', "lengths.prompt and output are not expected together with like"),
    ('prompt = "uniform:1:30"', "", "lengths.like is missing: expected it, or prompt and output"),
    ("low = 0.05", "low = 0", "search.low is 0: expected at least 0.0001"),
    ("low = 0.05", "low = 5", "search.high is 3.2: expected at least low"),
    ("step = 2.0", "step = 1.0", "search.step is 1.0: expected at least 1.001"),
    ('"per_token_s.mean"', '"speed"', "search.goals.0.metric is 'speed': expected one of ttft_s"),
    ("step = 2.0", "step = 2.0\nstep_per_s = 1.0", "search.step is not expected together with step_per_s"),
    ("high = 3.2\nstep = 2.0", "high = 1000\nstep_per_s = 1e-3", "search.step_per_s is 0.001: expected at most 100000"),
    ('"per_token_s.mean"\nlimit = 3.0', '"slo"', "small.toml: slo is missing: expected it with the goal slo"),
    ("limit = 3.0", "", "search.goals.0.limit is missing: expected the highest value of metric"),
    ('"per_token_s.mean"\n', '"slo"\n', "search.goals.0.limit is 3: expected none, because slo has limits"),
    ('compare_at = "fcfs"', 'compare_at = "x"', "search.compare_at is 'x': expected the name of an arm"),
    ('name = "srpt"', 'name = "fcfs"', "arms.1.name is 'fcfs': expected another name"),
    ('name = "srpt"', "", "arms.1.name is None: expected a name"),
    ("seed = 1", "seed = 1\nrates = [1.0, -2.0]", "rates.1 is -2: expected a number from 0.0001"),
    ("seed = 1", 'seed = 1\ntrace = "t.csv"', "trace is 't.csv': expected with"),
    ("seed = 1", 'seed = "one"', "seed is 'one': expected a whole number"),
    ("seed = 1", "seed = ", "not TOML"),
    (
        "[search]",
        '[[failures]]\nprocess = "worker-7"\nat_s = 1.0\n[search]',
        "failures: there is no worker-7: expected worker-0 to worker-0",
    ),
    (
        "[search]",
        '[[failures]]\nprocess = "gateway-0"\nat_s = 1.0\n[search]',
        "failures.0.process is 'gateway-0': expected",
    ),
    (
        "[search]",
        '[[failures]]\nprocess = "worker-0"\nat_s = 2.0\nrestart_at_s = 1.0\n[search]',
        "failures.0.restart_at_s is 1.0: expected a time after at_s",
    ),
    (
        "[search]",
        '[[failures]]\nprocess = "worker-0"\nat_s = 2.0\n[[failures]]\nprocess = "worker-0"\nat_s = 3.0\n[search]',
        "failures: worker-0 is killed at 3.0 s, but is not running then",
    ),
    ("[search]", "[priorities]\nhigh = 1.0\n[search]", "priorities.high is 1: expected a whole number"),
    (
        "[search]",
        "[prefixes]\ncount = 1\ntokens = 5\n[search]",
        "prefixes have no effect: expected cluster.prefix_cache",
    ),
]


FAR_OFF = [
    ('figures=["speed"]', "figures.0 is 'speed': expected a figure, as latency.ttft_s.p99"),
    ('plot_by="instances.mean"', "plot_by is not expected without figures"),
    (
        'cluster.dispatch="random"',
        "cluster.dispatch is 'random': expected 'freeness', 'shortest_queue', 'least_loaded'",
    ),
    ("cluster.migration=true", "cluster.migration is true: expected a table"),
    ('cluster.migration.mode="off"', "cluster.migration.mode is 'off': expected 'live', 'blocking' or 'recompute'"),
    ("cluster.migration.source_until=500.0", "cluster.migration.source_until is 500: expected a number from 32"),
    ("cluster.migration.bytes_per_s=0.0", "cluster.migration.bytes_per_s is 0.0: expected at least 1"),
    (
        "cluster.scaling={min_workers=2}",
        "cluster.scaling.min_workers has no effect without max_workers: set max_workers",
    ),
    ("cluster.scaling={max_workers=2,min_workers=3}", "cluster.scaling.min_workers is 3: expected at most 2"),
    (
        "cluster.scaling={max_workers=2,scale_out_below=900.0}",
        "cluster.scaling.scale_out_below is 900: expected less than scale_in_above",
    ),
    (
        "cluster.headroom_tokens_by_priority={x=3}",
        "cluster.headroom_tokens_by_priority.x is 3: expected a whole number of 32 bits = tokens",
    ),
    ("arrivals.cycle={factors=[],each_s=1.0}", "arrivals.cycle.factors is empty: expected at least one"),
    ("arrivals.cycle={factors=[0.0],each_s=1.0}", "arrivals.cycle.factors.0 is 0: expected a number from 0.001"),
    (
        "arrivals={cycle={factors=[1.0],each_s=1.0},spike={at_s=1.0,duration_s=1.0,factor=2.0}}",
        "arrivals.spike is not expected together with cycle",
    ),
    ('lengths.prompt="lognormal:161:338:1024"', "lengths.prompt: length distribution 'lognormal:161:338:1024': SIGMA"),
    ('lengths.prompt="powerlaw-mean:5:1e300"', "lengths.prompt: length distribution 'powerlaw-mean:5:1e300': MAX must"),
    ("lengths.prompt=true", "lengths.prompt is true: expected a length, or a distribution"),
    ("search.edge_seeds=[2]\nseeds=[1]", "small.toml: search.edge_seeds are not expected together with seeds"),
    ("lengths.ratio=1e308", "lengths.ratio is 1e+308: expected at most 10000"),
    ("priorities={}", "priorities is empty: expected at least one"),
    ("priorities.99999999999999999999=1", "priorities.99999999999999999999 is 1: expected a whole number of 32 bits"),
    ("priorities={1=1e308,2=1e308}", "priorities.1 is 1e+308: expected a whole number of 32 bits = a share above 0"),
    ("arrivals.cv=1e-200", "arrivals.cv is 1e-200: expected at least 0.01"),
    ("arrivals.rate_per_s=1e300", "arrivals.rate_per_s is 1e+300: expected at most 1e+06"),
    ("arrivals.rate_per_s=1e-300", "arrivals.rate_per_s is 1e-300: expected at least 0.0001"),
    ("duration_s=1e300", "duration_s is 1e+300: expected at most 2.6784e+06"),
    ("rates=[1e300]", "rates.0 is 1e+300: expected a number from 0.0001 to 1e+06"),
    ("search.step=1.0000001", "search.step is 1.0000001: expected at least 1.001"),
    ("cluster.kv_tokens=999999999999999999", "cluster.kv_tokens is 999999999999999999: expected at most 1000000000"),
    ("cluster.host_kv_tokens=9999999999999", "cluster.host_kv_tokens is 9999999999999: expected at most 1000000000"),
    ("cluster={kv_tokens=1000000000,instances=10}", "cluster.tokens_per_block is 4: it makes 2500001000 blocks"),
    ("cluster.instances=100000", "cluster.instances is 100000: expected at most 10000"),
    ("cluster.load_report_s=1e-300", "cluster.load_report_s is 1e-300: expected at least 0.001"),
    ("cluster.retry_s=1e-300", "cluster.retry_s is 1e-300: expected at least 0.001"),
    ("cluster.promote_after_s=1e-300", "cluster.promote_after_s is 1e-300: expected at least 0.001"),
    ("cluster.network_s=1e300", "cluster.network_s is 1e+300: expected at most 10"),
    ("cluster.prefix_cache=1", "cluster.prefix_cache is 1: expected true or false"),
    ('cluster.profile="a\\u0000.toml"', "cluster.profile is 'a\\x00.toml': expected a path, without NUL"),
    ('cluster.profile="' + "a" * 300 + '.toml"', "cluster.profile: there is no file "),
    ('trace="a\\u0000"', "trace is 'a\\x00': expected a path, without NUL"),
    ('variants=[{name="v",x=nan}]', "v: fcfs: x is nan: expected a number above 0"),
    ('variants=[{name="v",x=1e400}]', "v: fcfs: x is inf: expected a number above 0"),
    ('variants=[{name="a\\nb"}]', "variants.0.name is 'a\\nb': expected a name"),
    ('arms=[{name="fcfs",x=3}]', "fcfs: x is unknown: expected arrivals, cluster"),
    ("arms=[5]", "arms.0 is 5: expected a table"),
    ('"a\\nb"=5', "'a\\nb' is unknown: expected arms"),
    ("seed=0x" + "f" * 5000, "seed is a huge number: expected at most 9223372036854775807"),
    ("cluster=5", "cluster is 5: expected a table"),
    ("failures=5", "failures is 5: expected a list of tables"),
    ("failures=[5]", "failures.0 is 5: expected a table"),
    (
        'failures=[{process="gateway-0",at_s=1.0}]',
        "failures.0.process is 'gateway-0': expected coordinator, or worker-N",
    ),
]


@pytest.mark.parametrize(("setting", "told"), FAR_OFF, ids=[f"{number}" for number in range(len(FAR_OFF))])
def test_a_value_far_off_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, told: str) -> None:
    """A value that no run can work with, or that would make it endless, gives one line that names its key, before any
    run.
    """
    assert main([str(write(tmp_path)), "--out", str(tmp_path), "--set", setting]) == EXIT_UNUSABLE
    err = capsys.readouterr().err
    assert err.startswith("simulate: ")
    assert err.count("\n") == 1
    assert told in err
    assert not (tmp_path / "metrics.json").exists()


def test_goals_are_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A search without goals is told that it needs a list of them."""
    text = EXPERIMENT.replace('[[search.goals]]\nmetric = "per_token_s.mean"\nlimit = 3.0\n', "")
    assert main([str(write(tmp_path, text)), "--out", str(tmp_path)]) == EXIT_UNUSABLE
    assert "search.goals is missing: expected a list of tables" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (bytes(range(256)), "not text (UTF-8)"),
        (b"seed = " + b"9" * 5000, "not TOML"),
        (b"a = " + b"[" * 9999, "not TOML"),
    ],
    ids=["bytes", "long number", "deep list"],
)
def test_a_file_of_something_else_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, told: str
) -> None:
    """A file that is not TOML gives an error of one line."""
    file = tmp_path / "some.toml"
    file.write_bytes(content)
    assert main([str(file), "--out", str(tmp_path)]) == EXIT_UNUSABLE
    err = capsys.readouterr().err
    assert f"{file}: {told}" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("out", ["file", "file/below", "folder"])
def test_where_nothing_can_be_written_is_told_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    """A file in place of the output folder, or a folder in place of the results, gives one line before any run."""
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "metrics.json").mkdir(parents=True)
    assert main([str(write(tmp_path)), "--out", str(tmp_path / out)]) == EXIT_UNUSABLE
    err = capsys.readouterr().err
    assert err.startswith(f"simulate: cannot write {tmp_path / out}")
    assert err.count("\n") == 1  # no run was begun


@pytest.mark.parametrize(("was", "now", "told"), WRONG, ids=[f"{number}" for number in range(len(WRONG))])
def test_a_wrong_file_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], was: str, now: str, told: str
) -> None:
    """An error in a file is one line that names the file, the key and what was expected."""
    assert EXPERIMENT.count(was) >= 1
    file = write(tmp_path, EXPERIMENT.replace(was, now, 1))
    assert main([str(file), "--out", str(tmp_path)]) == EXIT_UNUSABLE
    err = capsys.readouterr().err
    assert err.startswith("simulate: ")
    assert err.count("\n") == 1
    assert told in err


def test_a_profile_without_a_quantum_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A profile whose shortest iteration takes no time, so that its first quantum is 0, gives an error that names its
    key.
    """
    file = write(tmp_path)
    profile = tmp_path / "tiny.toml"
    profile.write_text(profile.read_text().replace("seconds = [0.5, 0.5]", "seconds = [0, 0.5]"))
    assert main([str(file), "--out", str(tmp_path)]) == EXIT_UNUSABLE
    assert "tiny.toml: decode.seconds[0] is 0: expected more than 0" in capsys.readouterr().err


def test_a_profile_of_a_machine_that_drifted_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A profile that was measured while the machine's speed changed is used, and one line tells it."""
    file = write(tmp_path, EXPERIMENT.replace("num_requests = 40", "num_requests = 4"))
    assert main([str(file), "--out", str(tmp_path / "out")]) == 0
    assert "errors.drift" not in capsys.readouterr().err
    with (tmp_path / "tiny.toml").open("a") as profile:
        profile.write("\n[errors]\ndrift = 0.35\n")
    assert main([str(file), "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().err.count("changed by 35% (errors.drift)") == 1


def test_a_damaged_trace_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged row of a trace gives one line that names the file, the row and the column."""
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,-4,1\n")
    text = EXPERIMENT.replace('prompt = "uniform:1:30"\noutput = "uniform:1:30"', 'like = "trace"')
    file = write(tmp_path, text.replace("seed = 1", 'seed = 1\ntrace = "t.csv"'))
    assert main([str(file), "--out", str(tmp_path)]) == EXIT_UNUSABLE
    assert "t.csv, line 2: ContextTokens is -4, not between 0" in capsys.readouterr().err


def test_no_journal_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A replay of an empty file, or of one that is not a log, gives an error of one line."""
    (tmp_path / "text").write_text("hello, this is no journal at all")
    for name in ("text", "nothing"):
        assert main(["--replay", str(tmp_path / name)]) == EXIT_UNUSABLE
        assert name in capsys.readouterr().err


@pytest.mark.parametrize("text", ["seed", "=1", "a b=1"])
def test_a_wrong_override_is_told(text: str) -> None:
    """``--set`` without a key and a value is refused."""
    with pytest.raises(ActorserveError, match="expected KEY=VALUE"):
        parse_override(text)


def test_overrides_are_values_or_texts() -> None:
    """A value that TOML can read has that type; anything else is a string."""
    assert parse_override("cluster.instances=4") == {"cluster": {"instances": 4}}
    assert parse_override("trace=/tmp/a.csv") == {"trace": "/tmp/a.csv"}


def test_the_highest_rate_is_found_by_bisection() -> None:
    """Of growing rates the search finds the last that holds, with few tries; none if even the first does not hold."""
    asked: list[float] = []

    def below(limit: float) -> float | None:
        def is_held(rate: float) -> bool:
            asked.append(rate)
            return rate <= limit

        asked.clear()
        return highest_held([float(rate) for rate in range(1, 101)], is_held)

    for limit in (0.5, 1.0, 37.0, 99.5, 1000.0):
        found = below(limit)
        assert found == (min(100.0, float(int(limit))) or None)
        assert len(asked) <= 7


def test_steps_may_be_equal() -> None:
    """With ``step_per_s`` the rates of a search have equal distances, and the last one is the highest."""
    search = Search.model_validate({"low": 2.0, "high": 8.0, "step_per_s": 2.0, "goals": [{"metric": "slo"}]})
    assert search.rates() == [2.0, 4.0, 6.0, 8.0]
    assert [search.is_highest(rate) for rate in search.rates()] == [False, False, False, True]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((5, 5, 5), 5.0),
        ((5, 3, 3), 3.0),  # the first seed holds more than the others
        ((5, 9, 9), 9.0),
        ((5, 9, 3), 5.0),
        ((0, 4, 6), 4.0),
        ((5, 0, 0), None),
        ((0, 0, 9), None),
        ((12, 12, 1), 10.0),
    ],
)
def test_most_seeds_hold_the_rate_at_the_edge(limits: tuple[int, ...], expected: float | None) -> None:
    """Near the rate of the first seed, the one is found that most seeds hold, whichever seed holds more."""
    rates = [float(rate) for rate in range(1, 11)]
    found = highest_held(rates, lambda rate: rate <= limits[0])
    assert edge_held(rates, found, 3, lambda rate, place: rate <= limits[place]) == expected


def test_a_search_runs_its_edge_seeds(tmp_path: Path) -> None:
    """A rate that the file's seed holds counts only if most of the seeds hold it; others alone may hold a rate, too."""
    found = {}
    for name, seeds in (("alone", ""), ("others", "edge_seeds = [2, 3, 4, 5]\n")):
        text = EXPERIMENT.replace("step = 2.0\n", f"step_per_s = 0.1\n{seeds}")
        experiment = read_experiment(write(tmp_path, text), {})
        result = run_experiment(experiment, 1, lambda progress: None)[0]
        found[name] = result.held[0]
    goal = Goal(metric="per_token_s.mean", limit=3.0)
    case = experiment.cases[0]

    def num_held(rate: float | None) -> int:
        assert rate is not None
        return sum(holds(run_once(case.with_seed(seed), rate, lambda share: None), goal) for seed in range(1, 6))

    assert found["others"] != found["alone"]
    assert num_held(found["others"]) >= 3
    assert num_held(found["alone"]) < 3 or num_held((found["alone"] or 0.0) + 0.1) >= 3


def test_a_bracket_of_short_runs_decides_nothing(tmp_path: Path) -> None:
    """With shorter runs in the bisection, whole runs still hold the rate that is found, and not the next one."""
    text = EXPERIMENT.replace("step = 2.0\n", "step_per_s = 0.1\nbracket_s = 5.0\n")
    experiment = read_experiment(write(tmp_path, text), {})
    result = run_experiment(experiment, 1, lambda progress: None)[0]
    found = result.held[0]
    assert found is not None
    search = experiment.plan.search
    assert search is not None
    short = [
        rate
        for rate in search.rates()
        if holds(run_once(experiment.cases[0].with_duration(5.0), rate, lambda share: None), search.goals[0])
    ]
    assert max(short) != found, "the short runs find another rate, so this test could fail"
    assert holds(result.runs[found], search.goals[0])
    assert not holds(result.runs[float(f"{found + 0.1:.6g}")], search.goals[0])


def test_service_levels_are_a_goal() -> None:
    """The goal ``slo`` is missed by a broken limit, and by a request that did not complete."""
    goal = Goal(metric="slo")
    figures = {"slo": {"breaks": []}, "requests": {"arrived": 3, "completed": 3}}
    assert holds(figures, goal)
    assert not holds(figures | {"slo": {"breaks": ["ttft.p99"]}}, goal)
    assert not holds(figures | {"requests": {"arrived": 3, "completed": 2}}, goal)


def test_a_rate_is_held_by_all() -> None:
    """A goal is missed by its figure, and by any request that was refused or has not finished."""
    goal = Goal(metric="ttft_s.p99", limit=1.0)
    figures = {"latency": {"ttft_s": {"p99": 1.0}}, "requests": {"arrived": 3, "completed": 3}}
    assert holds(figures, goal)
    assert not holds(figures | {"latency": {"ttft_s": {"p99": 1.1}}}, goal)
    assert not holds(figures | {"requests": {"arrived": 3, "completed": 2}}, goal)


@pytest.mark.parametrize("file", sorted((ROOT / "config" / "simulations").glob("*.toml")), ids=lambda file: file.stem)
def test_shipped_experiments_are_right(file: Path) -> None:
    """Every experiment that is shipped can be read, with its profile."""
    assert read_experiment(file, {}).cases
