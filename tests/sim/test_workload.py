"""Workloads of measurements and simulations: lengths, arrivals, traces."""

import math
import random
import re
import tracemalloc
from itertools import islice
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

import pytest

from actorserve.errors import SimulationError, WorkloadError
from actorserve.sim.arrivals import arrivals
from actorserve.sim.workload.lengths import PAIRS, parse_lengths
from actorserve.sim.workload.requests import (
    Arrival,
    Prompts,
    cut,
    cycle_factors,
    gamma_times,
    independent,
    poisson_times,
    regular_times,
    replayed,
    sampled,
    spike_factors,
    synthetic,
    warped,
    with_ratio,
)
from actorserve.sim.workload.traces import TraceRow, read_trace
from tests.sim.runs import config
from tools.simulation.experiment import merged

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


@pytest.mark.parametrize("mean", [128, 256, 512])
def test_a_power_law_is_found_by_its_mean(mean: int) -> None:
    """Lengths of up to 6k with the means that Llumnix generates."""
    lengths = drawn(f"powerlaw-mean:{mean}:6144", 200_000)
    assert fmean(lengths) == pytest.approx(mean, rel=0.05)
    assert 1 <= min(lengths) <= max(lengths) <= 6144
    assert median(lengths) < mean / 2


@pytest.mark.parametrize(("name", "prompt", "output"), [("sharegpt", 161, 338), ("alpaca", 19, 58)])
def test_what_is_like_a_dataset_has_its_means(name: str, prompt: int, output: int) -> None:
    """Prompts and outputs have the published means, and long tails."""
    for spec, mean in zip(PAIRS[name], (prompt, output), strict=True):
        lengths = drawn(spec, 200_000)
        assert fmean(lengths) == pytest.approx(mean, rel=0.02)
        assert max(lengths) > 5 * mean


@pytest.mark.parametrize(
    ("name", "prompts", "outputs"),
    [("azure-conversation", (1155, 1020, 2735), (211, 129, 424)), ("azure-code", (2048, 1469, 5188), (27.9, 13, 55))],
)
def test_fits_are_near_the_traces(name: str, prompts: tuple[float, ...], outputs: tuple[float, ...]) -> None:
    """Mean, median and P90 of the fits are within 40 % of the traces' (sampling from the rows is better)."""
    for spec, figures in zip(PAIRS[name], (prompts, outputs), strict=True):
        lengths = sorted(drawn(spec))
        found = (fmean(lengths), lengths[10_000], lengths[18_000])
        assert found == pytest.approx(figures, rel=0.4)


@pytest.mark.parametrize(
    "spec",
    [
        *("", "x", "fixed", "fixed:0", "fixed:-1", "uniform:5", "uniform:9:2", "lognormal:1:nan:3", "zipf:1", "1:2"),
        *("powerlaw-mean:200:100", "lognormal-mean:50:1:40", "fixed:inf"),
        *("lognormal:161:338:1024", "lognormal-mean:161:338:1024", "powerlaw:1e-300:1e300:3", "powerlaw-mean:5:1e300"),
        *("powerlaw:1:9:99", "fixed:1e8", "lognormal:1:1e-9:5"),
    ],
)
def test_a_wrong_distribution_is_told(spec: str) -> None:
    """A text that is no distribution is refused with one line."""
    with pytest.raises(WorkloadError) as caught:
        parse_lengths(spec)
    assert "\n" not in str(caught.value)


def gaps(times: list[float]) -> list[float]:
    return [b - a for a, b in zip([0.0, *times], times, strict=False)]


def test_arrivals_are_a_poisson_process() -> None:
    """Gaps have the mean and the deviation of an exponential distribution, and arrivals are in order."""
    times = list(islice(poisson_times(20.0, random.Random(3)), 20_000))
    assert times == sorted(times)
    assert fmean(gaps(times)) == pytest.approx(0.05, rel=0.03)
    assert pstdev(gaps(times)) == pytest.approx(0.05, rel=0.03)


@pytest.mark.parametrize("cv", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_their_cv(cv: float) -> None:
    """Gaps of a Gamma process have the mean of its rate, and deviate by the CV."""
    found = gaps(list(islice(gamma_times(64.0, cv, random.Random(3)), 200_000)))
    assert fmean(found) == pytest.approx(1 / 64.0, rel=0.05)
    assert pstdev(found) / fmean(found) == pytest.approx(cv, rel=0.05)


def test_regular_arrivals_are_equally_far_apart() -> None:
    """One arrival per gap, the first after one gap."""
    assert list(islice(regular_times(4.0), 3)) == [0.25, 0.5, 0.75]


def test_a_spike_has_its_rate_and_no_more() -> None:
    """During the spike the rate is multiplied by its factor; before and after it the rate is unchanged."""
    times = list(islice(warped(regular_times(2.0), spike_factors(10.0, 5.0, 10.0)), 200))
    assert times == sorted(times)
    counts = [sum(at_s < time <= at_s + 5.0 for time in times) for at_s in (0.0, 5.0, 10.0, 15.0, 20.0)]
    assert counts == [10, 10, 100, 10, 10]


def test_a_rate_goes_up_and_down_in_a_cycle() -> None:
    """Each factor holds for its time, and the first follows the last."""
    times = list(islice(warped(regular_times(10.0), cycle_factors((0.5, 2.0), 4.0)), 300))
    counts = [sum(at_s < time <= at_s + 4.0 for time in times) for at_s in (0.0, 4.0, 8.0, 12.0)]
    assert counts == [20, 80, 20, 80]


def test_bursts_stay_what_they_are_in_a_spike() -> None:
    """A process that runs faster has gaps that are shorter, and deviate by the same share."""
    times = warped(gamma_times(10.0, 3.0, random.Random(5)), spike_factors(0.0, 1e6, 7.0))
    found = gaps(list(islice(times, 100_000)))
    assert fmean(found) == pytest.approx(1 / 70.0, rel=0.05)
    assert pstdev(found) / fmean(found) == pytest.approx(3.0, rel=0.05)


def test_a_workload_depends_on_its_seed_alone() -> None:
    """The same seed gives the same requests, another seed others; the rate changes times but no lengths."""
    lengths = independent(parse_lengths("uniform:1:1000"), parse_lengths("uniform:1:1000"))
    one = synthetic(lengths, 50, 2.0, seed=1)
    assert one == synthetic(lengths, 50, 2.0, seed=1)
    assert one != synthetic(lengths, 50, 2.0, seed=2)
    faster = synthetic(lengths, 50, 4.0, seed=1)
    assert [(a.prompt_tokens, a.output_tokens) for a in one] == [(a.prompt_tokens, a.output_tokens) for a in faster]
    assert faster[-1].at_s == pytest.approx(one[-1].at_s / 2)


def test_a_ratio_keeps_the_total() -> None:
    """The mean prompt is the ratio times the mean output, the mean sum stays, and each length is at least 1."""
    pairs = independent(parse_lengths("uniform:1:300"), parse_lengths("uniform:1:100"))
    for ratio in (0.25, 1.0, 256.0):
        draw, rng = with_ratio(pairs, ratio), random.Random(1)
        prompts, outputs = zip(*(draw(rng) for _ in range(5000)), strict=True)
        assert min(prompts) >= 1
        assert min(outputs) >= 1
        assert sum(prompts) + sum(outputs) == pytest.approx(5000 * 201, rel=0.03)
        assert sum(prompts) / sum(outputs) == pytest.approx(ratio, rel=0.3 if ratio > 100 else 0.05)  # rounding up to 1


def test_who_is_too_long_is_cut() -> None:
    """A request that is too long loses prompt tokens first, but keeps one."""
    assert cut(10, 5, 15) == (10, 5)
    assert cut(100, 5, 15) == (10, 5)
    assert cut(100, 50, 15) == (1, 14)


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
    with pytest.raises(WorkloadError, match="no times"):
        replayed(rows, None, False, 1.0, None, 0)


def test_a_trace_can_be_scaled_and_cut() -> None:
    """Times are scaled; a request that is too long loses prompt before output."""
    rows = [TraceRow(0.0, 100, 20), TraceRow(4.0, 10, 500)]
    assert replayed(rows, None, False, 0.5, 50, 0) == [Arrival(0.0, 30, 20), Arrival(2.0, 1, 49)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a,b\n1,2\n", "its first line must be"),
        ("", "its first line must be TIMESTAMP,ContextTokens,GeneratedTokens, but is nothing"),
        ("TIMESTAMP;ContextTokens;GeneratedTokens\n", "but is 'TIMESTAMP;ContextTokens;GeneratedTokens': expected one"),
        ("TIMESTAMP,ContextTokens\n", "expected one column GeneratedTokens or num_decode_tokens"),
        (AZURE.replace("TIMESTAMP", "ContextTokens"), "expected one column ContextTokens or num_prefill_tokens"),
        (AZURE.splitlines()[0], "there are no requests in it: expected lines with a prompt and an output"),
        (AZURE + "\n2023-11-16 18:17:07,5,1,7", "line 6: 4 values: expected 3, as in the first line"),
        (AZURE + '\n"2023-11-16 18:17:07"x,5,1', "line 6: "),
        (AZURE + "\n2023-11-16 18:17:07,nan,1", "line 6: ContextTokens is 'nan', not a number of tokens"),
        (AZURE + "\n2023-11-16 18:17:07,1_000,1", "line 6: ContextTokens is '1_000', not a number of tokens"),
        (AZURE + "\nNaN,5,1", "line 6: TIMESTAMP is 'NaN', not a time like"),
        (AZURE + "\nx,1,1", "line 6: TIMESTAMP is 'x', not a time"),
        (AZURE + "\n,1,1", "line 6: TIMESTAMP is missing"),
        (AZURE + "\n2023-11-16 18:17:07,,1", "line 6: ContextTokens is missing"),
        (AZURE + "\n2023-11-16 18:17:07,5,", "line 6: GeneratedTokens is missing"),
        (AZURE + "\n2023-11-16 18:17:07,5", "line 6: 2 values: expected 3"),
        (AZURE + "\n2023-11-16 18:17:07,5,many", "line 6: GeneratedTokens is 'many', not a number"),
        (AZURE + "\n2023-11-16 18:17:07,5,1.5", "line 6: GeneratedTokens is '1.5', not a number"),
        (AZURE + "\n2023-11-16 18:17:07,-5,1", "line 6: ContextTokens is -5, not between 0"),
        (AZURE + "\n2023-11-16 18:17:07,5,99999999999", "line 6: GeneratedTokens is 99999999999, not between 0"),
        (AZURE + "\n2023-11-16 18:17:06,5,1", "line 6: TIMESTAMP is before the line above"),
        (AZURE + "\n2023-11-16 18:17:07+00:00,5,1", "line 6: TIMESTAMP has a time zone"),
        (AZURE + "\n9999-11-16 18:17:07,5,1", "line 6: TIMESTAMP is 2913174 days after the first"),
        (AZURE + "\n\0", "trace"),
    ],
)
def test_a_bad_trace_is_told(tmp_path: Path, text: str, why: str) -> None:
    """A file that is no trace is refused with one line that names it, the row and what was expected."""
    file = tmp_path / "trace.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(WorkloadError) as caught:
        read_trace(file)
    assert why in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [AZURE.replace("\n", "\r\n"), AZURE + "\n", AZURE + "\n\n"])
def test_a_trace_may_have_any_line_ends(tmp_path: Path, text: str) -> None:
    """Lines that end as on Windows, and a file with a newline at its end or with an empty line, give the same rows."""
    plain, other = tmp_path / "plain.csv", tmp_path / "other.csv"
    plain.write_text(AZURE, encoding="utf-8")
    other.write_bytes(text.encode())
    assert read_trace(other) == read_trace(plain)


def test_a_trace_may_begin_with_a_mark(tmp_path: Path) -> None:
    """A byte order mark, as spreadsheets write it, is no part of the first column's name."""
    file = tmp_path / "trace.csv"
    file.write_text(AZURE, encoding="utf-8-sig")
    assert len(read_trace(file)) == 3


@pytest.mark.parametrize(
    "spec",
    [
        *("lognormal:1e7:10:1e7", "lognormal:0.001:10:1e7", "lognormal-mean:1000:0.001:1e7"),
        *("powerlaw:0.001:1e7:10", "powerlaw:1:1e7:0.001", "powerlaw:0.001:1e7:1.00000001", "powerlaw-mean:2:1e7"),
    ],
)
def test_distributions_at_their_bounds_can_be_drawn(spec: str) -> None:
    """Nothing overflows at the largest and smallest accepted numbers."""
    lengths = drawn(spec, 200)
    assert 1 <= min(lengths) <= max(lengths) <= 10_000_001


def test_a_trace_is_not_stretched_without_end() -> None:
    """A scale that makes a trace last longer than a month gives an error that names its key."""
    changes = {
        "trace": "x",
        "arrivals": {"process": "trace", "rate_per_s": None, "time_scale": 1e6},
        "lengths": {"like": "trace", "prompt": None, "output": None},
    }
    with pytest.raises(SimulationError, match=r"arrivals\.time_scale is 1e\+06: it makes the trace 69\.4444 days long"):
        next(arrivals(config(changes), ROWS))


ROWS = [TraceRow(0.0, 10, 1), TraceRow(2.0, 20, 2), TraceRow(6.0, 300, 3)]


def test_a_trace_is_replayed_as_it_was() -> None:
    """A run over a trace has its times, scaled, and its lengths in order, cut at the context."""
    changes = {
        "num_requests": 5,
        "trace": "x",
        "arrivals": {"process": "trace", "rate_per_s": None, "time_scale": 0.5},
        "lengths": {"like": "trace", "prompt": None, "output": None},
    }
    assert list(arrivals(config(changes), ROWS)) == [Arrival(0.0, 10, 1), Arrival(1.0, 20, 2), Arrival(3.0, 197, 3)]


def test_rows_are_drawn_whole() -> None:
    """Lengths that are drawn from a trace keep each prompt with its output."""
    draw, rng = sampled(ROWS), random.Random(0)
    assert {draw(rng) for _ in range(100)} == {(10, 1), (20, 2), (300, 3)}


def test_rows_can_be_drawn_apart() -> None:
    """With ``together = false`` a prompt may have the output of another row, also at the trace's own times."""
    changes = {
        "num_requests": 100,
        "trace": "x",
        "lengths": {"like": "trace", "together": False, "prompt": None, "output": None},
    }
    found = {(arrival.prompt_tokens, arrival.output_tokens) for arrival in arrivals(config(changes), ROWS)}
    cut = {(199, 1), (198, 2), (197, 3)}  # the longest prompt, which does not fit with any output
    assert found == {(prompt, output) for prompt in (10, 20) for output in (1, 2, 3)} | cut
    at_its_times = {**changes, "arrivals": {"process": "trace", "rate_per_s": None}}
    found_s = [arrival.at_s for arrival in arrivals(config(at_its_times), ROWS)]
    assert found_s == [row.at_s for row in ROWS]


def test_classes_have_their_shares_lengths_and_beginnings() -> None:
    """Each request belongs to one class, whose prompts begin alike; the shares are kept."""
    changes = {
        "num_requests": 4000,
        "cluster": {"prefix_cache": True},
        "lengths": {
            "prompt": None,
            "output": None,
            "classes": [
                {"share": 3.0, "prompt": 20, "output": 5, "prefix_tokens": 16},
                {"share": 1.0, "prompt": "uniform:30:40", "output": 50},
            ],
        },
    }
    found = list(arrivals(config(changes), ()))
    short = [arrival for arrival in found if arrival.prefix == 0]
    assert {(one.prompt_tokens, one.output_tokens, one.prefix_tokens) for one in short} == {(20, 5, 16)}
    others = [arrival for arrival in found if arrival.prefix == 1]
    assert {(one.output_tokens, one.prefix_tokens) for one in others} == {(50, 0)}
    assert {one.prompt_tokens for one in others} == set(range(30, 41))
    assert len(short) == pytest.approx(3000, abs=120)


def test_classes_take_turns() -> None:
    """The class of a request depends on its time alone: 30 seconds each, one after the other."""
    classes = [{"share": 1.0, "prompt": 20, "output": 5}, {"share": 1.0, "prompt": 30, "output": 50}]
    changes = {
        "num_requests": None,
        "duration_s": 100.0,
        "lengths": {"prompt": None, "output": None, "classes": classes, "turn_s": 30.0},
    }
    found = list(arrivals(config(changes), ()))
    assert {one.prefix for one in found} == {0, 1}
    assert all(one.prefix == int(one.at_s // 30.0) % 2 for one in found)
    assert {(one.prefix, one.prompt_tokens) for one in found} == {(0, 20), (1, 30)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": {"turn_s": 30.0}}, "turn_s is 30: expected only with two or more classes"),
        ({"cluster": {"prefix_cache": False}}, "prefix_tokens have no effect: expected cluster.prefix_cache"),
        ({"prefixes": {"count": 1, "tokens": 4}}, "prefixes are not expected together with prefix_tokens"),
        ({"lengths": {"like": "alpaca"}}, "like is not expected together with classes"),
        ({"lengths": {"classes": [{"share": 1.0, "prompt": "x", "output": 1}]}}, "classes.0.prompt: no such length"),
        ({"lengths": {"classes": [{"share": 0.0, "prompt": 1, "output": 1}]}}, "classes.0.share is 0.0: expected"),
    ],
)
def test_wrong_classes_are_told(changes: dict[str, Any], message: str) -> None:
    """Classes that would have no effect, or exclude another setting, are refused with the name of the setting."""
    base = {
        "cluster": {"prefix_cache": True},
        "lengths": {
            "prompt": None,
            "output": None,
            "classes": [{"share": 1.0, "prompt": 20, "output": 5, "prefix_tokens": 16}],
        },
    }
    with pytest.raises(SimulationError, match=re.escape(message)):
        config(merged(base, changes))


def test_arrivals_end_with_the_duration() -> None:
    """No request arrives after ``duration_s``, and before it as many as the rate gives."""
    found = list(arrivals(config({"num_requests": None, "duration_s": 1000.0, "arrivals": {"process": "poisson"}}), ()))
    assert found[-1].at_s <= 1000.0
    assert len(found) == pytest.approx(1000, abs=4 * math.sqrt(1000))


def test_prompts_are_alike_as_far_as_they_shall_be() -> None:
    """Prompts of one prefix share its tokens and no more; if nothing is compared, prompts of one length are equal."""
    prompts = Prompts(compared=True)
    one, two, other = (
        prompts.token_ids(Arrival(0.0, 10, 1, prefix=prefix, prefix_tokens=4), number)
        for number, prefix in enumerate((0, 0, 1))
    )
    assert len(one) == 10
    assert one[:4] == two[:4]
    assert not set(one[4:]) & set(two)
    assert not set(one) & set(other)
    same = Prompts(compared=False)
    assert same.token_ids(Arrival(0.0, 10, 1), 0) == same.token_ids(Arrival(0.0, 10, 1), 1)


def test_a_prompt_is_kept_while_requests_have_it() -> None:
    """If nothing is compared, requests in flight share one prompt of a length, which goes with the last of them."""
    prompts = Prompts(compared=False)
    arrival = Arrival(0.0, 100_000, 1)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        first = prompts.token_ids(arrival, 0)
        assert prompts.token_ids(arrival, 1) is first
        prompts.on_end(len(first))
        assert prompts.token_ids(arrival, 2) is first
        prompts.on_end(len(first))
        prompts.on_end(len(first))
        del first
        assert tracemalloc.get_traced_memory()[0] - before < 100_000
    finally:
        tracemalloc.stop()
