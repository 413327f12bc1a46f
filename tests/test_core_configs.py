"""The coordinator's process: what its core is made from."""

import pytest

from actorserve.core_configs import cluster_config
from actorserve.settings import load_settings


@pytest.mark.parametrize(
    ("load_report_s", "death_after_s", "expected_s"),
    [(0.2, 2.0, 1.0), (0.2, 20.0, 10.0), (0.5, 2.0, 2.5)],
)
def test_a_short_silence_is_no_illness(load_report_s: float, death_after_s: float, expected_s: float) -> None:
    """A worker counts as unwell after five reports have not come, and not before half of what counts as death."""
    cluster = {"load_report_s": load_report_s, "death_after_s": death_after_s}
    assert cluster_config(load_settings(None, {"cluster": cluster})).report_ttl_s == pytest.approx(expected_s)


def test_scaling_begins_with_those_that_are_started_anyway() -> None:
    """The workers that run from the start are under way when the coordinator begins; without scaling none matter."""
    settings = load_settings(None, {"workers": {"count": 3}, "scaling": {"max_workers": 4, "start_timeout_s": 7.0}})
    scaling = cluster_config(settings).scaling
    assert scaling is not None
    assert (scaling.num_initial, scaling.max_workers, scaling.start_timeout_s) == (3, 4, 7.0)
    assert cluster_config(load_settings(None, {"workers": {"count": 3}})).scaling is None
