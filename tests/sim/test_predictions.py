"""The policy that predicts, in whole runs: learning helps, and an error costs."""

from statistics import fmean
from typing import Any

from tests.sim.runs import run
from tools.simulation.experiment import merged

APPLICATIONS: dict[str, Any] = {
    "num_requests": 120,
    "cluster": {"prefix_cache": True, "kv_tokens": 280, "host_kv_tokens": 2000, "policy": "shortest_expected"},
    "arrivals": {"process": "poisson", "rate_per_s": 0.1},
    "lengths": {
        "prompt": None,
        "output": None,
        "classes": [
            {"share": 2.0, "prompt": 20, "output": "uniform:2:4", "prefix_tokens": 16},
            {"share": 1.0, "prompt": 30, "output": "uniform:40:60", "prefix_tokens": 20},
            {"share": 1.0, "prompt": 30, "output": "uniform:100:140", "prefix_tokens": 24},
        ],
    },
}
"""Three templates of 2 to 140 tokens, more than the memory holds at once."""


def mean_s(**cluster: Any) -> float:
    """The mean time of a request, over two seeds."""
    runs = [run(merged(APPLICATIONS, {"seed": seed, "cluster": cluster})) for seed in (1, 2)]
    return fmean(done.figures()["latency"]["e2e_s"]["mean"] for done in runs)


def test_learning_is_better_than_a_wild_guess() -> None:
    """With templates that repeat, what is learned from nothing on is nearer to an oracle than a guess with error 3.

    It is not limited by ``max_tokens``, which in a simulation is the output's length.
    """
    known_s, learned_s, wild_s = mean_s(length_error=0.0), mean_s(), mean_s(length_error=3.0)
    assert known_s < wild_s
    assert abs(learned_s - known_s) < 0.5 * (wild_s - known_s)
