"""How a measurement's figures are computed."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from actorserve.sim.statistics import percentile
from tools.benchmarks.serving.statistics import Outcome, make_report, summarize
from tools.figures.machine import parse_cpuinfo


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    """Percentiles equal an independent implementation's."""
    ordered = sorted(values)
    assert percentile(ordered, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-9)


def test_figures_of_one_request() -> None:
    """TTFT, TPOT, ITL and E2E follow their definitions; TPOT divides by the tokens after the first."""
    outcome = Outcome(10.0, [10.5, 10.6, 10.9], ended_s=11.0, prompt_tokens=7, output_tokens=5)
    assert outcome.ttft_s == pytest.approx(0.5)
    assert outcome.tpot_s == pytest.approx(0.1)
    assert outcome.itl_s == pytest.approx([0.1, 0.3])
    assert outcome.e2e_s == pytest.approx(1.0)
    assert Outcome(0.0, [1.0], 1.0, 7, 1).tpot_s is None
    assert Outcome(0.0).ttft_s is None


def test_a_report_counts_what_happened() -> None:
    """Failed and unfinished requests are counted apart, and only completed requests have latencies."""
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
