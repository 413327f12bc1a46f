"""Splitwise's service levels: slowdowns against an unloaded machine, the limits that they break, and growing queues."""

import math
from pathlib import Path
from typing import Any

import pytest

from actorserve.core.messages import FinishReason
from actorserve.sim.measures.slowdown import Reference, ServiceLevels
from actorserve.sim.results import Outcomes
from tests.sim.experiments import EXPERIMENT, write
from tests.sim.profiles import PROFILE
from tests.sim.runs import NETWORK_S, run
from tools.simulation.experiment import read_experiment
from tools.simulation.runner import run_once

LIMITS = {"ttft": (2.0, 3.0, 6.0), "tbt": (1.25, 1.5, 5.0), "e2e": (1.25, 1.5, 5.0)}


def levels(max_growth: float = 1.1) -> ServiceLevels:
    return ServiceLevels(Reference(PROFILE, 200), LIMITS, max_growth)


def met(*requests: tuple[float, float, float]) -> dict[str, Any]:
    """The figures of requests of 11 tokens with answers of 5, alone 2 s and 4 x 0.5 s: the time of arrival, to the
    first token, and from there to the last.
    """
    outcomes = Outcomes()
    for arrived_s, ttft_s, rest_s in requests:
        number = outcomes.arrive(arrived_s, 11, 5, 0)
        outcomes.first_token_s[number] = arrived_s + ttft_s
        outcomes.end(number, arrived_s + ttft_s + rest_s, FinishReason.LENGTH)
    return levels().figures(outcomes.completed())


def test_an_unloaded_machine_has_no_slowdown() -> None:
    """Requests that never meet take as long as the reference, but for the network, and break no limit."""
    figures = run({"num_requests": 6, "arrivals": {"rate_per_s": 0.1}}).figures(levels())["slo"]
    assert figures["slowdown"]["tbt"] == {name: pytest.approx(1.0) for name in ("p50", "p90", "p99")}
    for name, alone_s in (("ttft", 2.0), ("e2e", 3.5)):
        assert 1.0 < figures["slowdown"][name]["p99"] < 1.0 + 5 * NETWORK_S / alone_s
    assert figures["breaks"] == []
    assert figures["num_broken"] == 0


def test_each_slowdown_is_a_request_s_own() -> None:
    """Slowdowns are a request's times over its times alone: TTFT over the prompt's, TBT over the decodes', E2E over
    both.
    """
    figures = met((0.0, 3.0, 2.5))
    assert [figures["slowdown"][name]["p50"] for name in ("ttft", "tbt", "e2e")] == [1.5, 1.25, 1.375]
    assert figures["breaks"] == ["e2e.p50"]
    assert figures["growth"] == {"ttft": None, "e2e": None}  # there is no second half


def test_context_counts_token_by_token() -> None:
    """The reference decodes each token with the context that the request has then."""
    alone = Reference(PROFILE, 40)
    outcomes = Outcomes()
    outcomes.end(outcomes.arrive(0.0, 7, 6, 0), 1.0, FinishReason.LENGTH)
    (page,) = outcomes.completed()
    assert alone.decodes_s(page).tolist() == [
        pytest.approx(math.fsum(PROFILE.decode_s(1, 7 + place) for place in range(1, 6)))
    ]
    assert alone.ttft_s(page).tolist() == [PROFILE.prefill_s(7)]


@pytest.mark.parametrize(("num_slow", "broken"), [(1, ["p99"]), (12, ["p90", "p99"]), (60, ["p50", "p90", "p99"])])
def test_limits_hold_at_their_percentiles(num_slow: int, broken: list[str]) -> None:
    """A share of slow requests breaks the limits of the percentiles that it reaches, and no others."""
    requests = [(0.1 * number, 2.0, 2.0) for number in range(98)]
    for place in range(num_slow):
        requests[(place * 8) % 97] = (0.1 * ((place * 8) % 97), 13.0, 2.0)
    found = met(*requests, (98.0, 13.0, 2.0), (99.0, 13.0, 2.0))["breaks"]
    assert [name for name in found if name.startswith("ttft")] == [f"ttft.{percent}" for percent in broken]


def test_a_growing_queue_is_found() -> None:
    """Requests whose first tokens come later and later break the limit on growth, though they keep all others."""
    growing = met(*((float(at_s), 2.0 + 0.008 * at_s, 2.0) for at_s in range(100)))
    assert growing["breaks"] == ["growth.ttft"]
    assert growing["growth"]["ttft"] == pytest.approx(2.596 / 2.196)
    steady = met(*((float(at_s), 2.0 + 0.01 * (at_s % 10), 2.0) for at_s in range(100)))
    assert steady["breaks"] == []


def test_answers_of_one_token_have_no_tbt() -> None:
    """A request of one token counts for TTFT and E2E alone, and a run without requests has no slowdowns."""
    outcomes = Outcomes()
    number = outcomes.arrive(0.0, 11, 1, 0)
    outcomes.first_token_s[number] = 2.0
    outcomes.end(number, 2.0, FinishReason.LENGTH)
    figures = levels().figures(outcomes.completed())
    assert figures["slowdown"]["tbt"] is None
    assert figures["slowdown"]["ttft"]["p50"] == figures["slowdown"]["e2e"]["p50"] == 1.0
    assert levels().figures(Outcomes().completed())["slowdown"] == {"ttft": None, "tbt": None, "e2e": None}


def test_an_experiment_names_the_reference(tmp_path: Path) -> None:
    """With ``[slo]`` in the file each run has slowdowns; without it there are none."""
    asked = EXPERIMENT.replace("[search]", '[slo]\nreference = "tiny.toml"\nttft = [1e-3, 1e6, 1e6]\n[search]')
    case = read_experiment(write(tmp_path, asked), {}).cases[0]
    figures = run_once(case, 0.05, lambda share: None)["slo"]
    assert figures["breaks"][0] == "ttft.p50"
    without = read_experiment(write(tmp_path), {}).cases[0]
    assert run_once(without, 0.05, lambda share: None)["slo"] is None
