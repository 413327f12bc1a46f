"""Loads that no machine holds for long: what new requests feel of them."""

from dataclasses import replace
from typing import Any

import pytest

from actorserve.core.timing.profile import Curve, Link
from tests.sim.profiles import PROFILE
from tests.sim.runs import run

QUICK_PREFILL = replace(PROFILE, prefill=Curve((1.0, 1001.0), (0.5, 1.5)), swap=Link(0.0, 1e8))
"""A prompt of 11 tokens takes hardly longer than a decode, as on a GPU."""

OVERLOAD: dict[str, Any] = {
    "num_requests": 250,
    "cluster": {
        "policy": "skip_join_mlfq",
        "kv_tokens": 240,
        "host_kv_tokens": 400,
        "max_queue_per_instance": 1000,
        "max_waiting_requests": 1000,
    },
    "arrivals": {"process": "poisson", "rate_per_s": 0.5},
    "lengths": {"prompt": "uniform:5:15", "output": "uniform:1:150"},
}
"""Twice as many tokens as the instance can make, so that its host memory is soon full."""


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_new_requests_do_not_wait_for_long_ones_if_the_host_is_full(seed: int) -> None:
    """A newcomer's first token comes after few iterations however many preempted requests there are, because those
    ranked last give up their KV.
    """
    done = run({**OVERLOAD, "seed": seed}, QUICK_PREFILL)
    figures = done.figures()
    assert figures["requests"]["completed"] == 250
    assert figures["latency"]["ttft_s"]["mean"] < 5.0
