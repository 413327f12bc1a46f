"""What a measurement sends: lengths, arrivals, traces; and how its figures are worked out."""

import random
from pathlib import Path
from statistics import fmean, median, pstdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.benchmarks.errors import BenchError
from tools.benchmarks.lengths import parse_lengths
from tools.benchmarks.machine import parse_cpuinfo
from tools.benchmarks.statistics import Outcome, make_report, percentile, summarize
from tools.benchmarks.workload import Arrival, TraceRow, poisson_times_s, read_trace, replayed, synthetic

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:05.9799600,110,0
2023-11-16 18:17:06.9799600,110,27"""


def drawn(spec: str, count: int = 20_000) -> list[int]:
    lengths, rng = parse_lengths(spec), random.Random(1)
    return [lengths.draw(rng) for _ in range(count)]


def test_lengths_have_their_distributions() -> None:
    """Each distribution has the bounds and the middle that its name promises."""
    assert set(drawn("100")) == set(drawn("fixed:100")) == {100}
    uniform = drawn("uniform:50:150")
    assert (min(uniform), max(uniform)) == (50, 150)
    assert fmean(uniform) == pytest.approx(100, rel=0.02)
    lognormal = drawn("lognormal:200:0.8:4000")
    assert median(lognormal) == pytest.approx(200, rel=0.05)
    assert max(lognormal) <= 4000
    power = drawn("powerlaw:10:1000:2")
    assert 10 <= min(power) <= max(power) <= 1000
    # P(X > x) = (1/x - 1/1000) / (1/10 - 1/1000)
    assert sum(x > 100 for x in power) / len(power) == pytest.approx(0.0909, rel=0.1)
    assert max(drawn("powerlaw:1:100:1")) <= 100


@pytest.mark.parametrize(
    "spec", ["", "x", "fixed", "fixed:0", "fixed:-1", "uniform:5", "uniform:9:2", "lognormal:1:nan:3", "zipf:1", "1:2"]
)
def test_a_wrong_distribution_is_told(spec: str) -> None:
    """What is no distribution is refused with one line."""
    with pytest.raises(BenchError) as caught:
        parse_lengths(spec)
    assert "\n" not in str(caught.value)


def test_arrivals_are_a_poisson_process() -> None:
    """Gaps have the mean and the deviation of an exponential distribution, and arrivals are in order."""
    times = poisson_times_s(20.0, 20_000, random.Random(3))
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert times == sorted(times)
    assert fmean(gaps) == pytest.approx(0.05, rel=0.03)
    assert pstdev(gaps) == pytest.approx(0.05, rel=0.03)


def test_a_workload_depends_on_its_seed_alone() -> None:
    """The same seed gives the same requests, another seed others; the rate changes times but no lengths."""
    lengths = parse_lengths("uniform:1:1000")
    one = synthetic(lengths, lengths, 50, 2.0, seed=1)
    assert one == synthetic(lengths, lengths, 50, 2.0, seed=1)
    assert one != synthetic(lengths, lengths, 50, 2.0, seed=2)
    faster = synthetic(lengths, lengths, 50, 4.0, seed=1)
    assert [(a.prompt_tokens, a.output_tokens) for a in one] == [(a.prompt_tokens, a.output_tokens) for a in faster]
    assert faster[-1].at_s == pytest.approx(one[-1].at_s / 2)


def test_a_trace_is_read_as_published(tmp_path: Path) -> None:
    """Azure's file, without a newline at its end, gives times from its first row; rows without output are left out."""
    file = tmp_path / "trace.csv"
    file.write_text(AZURE, encoding="utf-8")
    rows = read_trace(file)
    assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [(4808, 10), (3180, 8), (110, 27)]
    assert [row.at_s for row in rows] == pytest.approx([0.0, 0.052, 3.0])
    assert len(read_trace(file, 2)) == 2


def test_a_file_of_lengths_needs_a_loop(tmp_path: Path) -> None:
    """A file without times can be used with a rate or a closed loop, and is refused otherwise."""
    file = tmp_path / "lengths.csv"
    file.write_text("num_prefill_tokens,num_decode_tokens\n74,918\n", encoding="utf-8")
    rows = read_trace(file)
    assert rows == [TraceRow(None, 74, 918)]
    assert replayed(rows, None, True, 1.0, None, 0) == [Arrival(0.0, 74, 918)]
    with pytest.raises(BenchError, match="no times"):
        replayed(rows, None, False, 1.0, None, 0)


def test_a_trace_can_be_scaled_and_cut() -> None:
    """Times are scaled; a request that is too long loses prompt before output."""
    rows = [TraceRow(0.0, 100, 20), TraceRow(4.0, 10, 500)]
    assert replayed(rows, None, False, 0.5, 50, 0) == [Arrival(0.0, 30, 20), Arrival(2.0, 1, 49)]


@pytest.mark.parametrize(
    ("text", "why"),
    [("a,b\n1,2\n", "first line"), ("", "first line"), (AZURE + "\nx,1,1", "line 6"), (AZURE + "\n\0", "trace")],
)
def test_a_bad_trace_is_told(tmp_path: Path, text: str, why: str) -> None:
    """A file that is no trace is refused with one line that names it."""
    file = tmp_path / "trace.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(BenchError, match=why) as caught:
        read_trace(file)
    assert str(file) in str(caught.value)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    """Percentiles equal an independent implementation's."""
    ordered = sorted(values)
    assert percentile(ordered, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-9)


def test_figures_of_one_request() -> None:
    """TTFT, TPOT, ITL and E2E are what their definitions say; TPOT divides by the tokens after the first."""
    outcome = Outcome(10.0, [10.5, 10.6, 10.9], ended_s=11.0, prompt_tokens=7, output_tokens=5)
    assert outcome.ttft_s == pytest.approx(0.5)
    assert outcome.tpot_s == pytest.approx(0.1)
    assert outcome.itl_s == pytest.approx([0.1, 0.3])
    assert outcome.e2e_s == pytest.approx(1.0)
    assert Outcome(0.0, [1.0], 1.0, 7, 1).tpot_s is None
    assert Outcome(0.0).ttft_s is None


def test_a_report_counts_what_happened() -> None:
    """Failed and unfinished requests are counted apart, and only completed ones make figures."""
    outcomes = [
        Outcome(0.0, [1.0, 2.0], 2.0, 10, 2),
        Outcome(1.0, [2.0, 4.0], 4.0, 10, 2),
        Outcome(1.0, error="status 503"),
        Outcome(2.0, [3.0]),
    ]
    report = make_report(outcomes, now_s=5.0)
    assert (report.num_requests, report.num_completed, report.num_unfinished) == (4, 2, 1)
    assert report.errors == {"status 503": 1}
    assert report.duration_s == 5.0
    assert report.output_tokens_per_s == pytest.approx(4 / 5)
    assert report.total_tokens_per_s == pytest.approx(24 / 5)
    ttft = report.latencies_s["ttft"]
    assert ttft is not None
    assert (ttft.count, ttft.mean) == (2, 1.0)
    assert make_report([], 5.0).latencies_s["e2e"] is None
    assert summarize([]) is None


def test_the_cpu_is_named() -> None:
    """The CPU's name and the instruction sets that matter are found in /proc/cpuinfo; an Arm's has no name."""
    text = "processor\t: 0\nmodel name\t: Some CPU\nflags\t: fpu avx2 avx512_vnni\n\nmodel name\t: Other\n"
    assert parse_cpuinfo(text) == ("Some CPU", ("avx2", "avx512_vnni"))
    assert parse_cpuinfo("processor\t: 0\nFeatures\t: fp asimd\n") == ("", ())
