"""The power of CPU packages comes from counters that wrap, or is unknown."""

from pathlib import Path

import pytest

from tests.workers.power.rapl_files import package
from workers.power.rapl import Rapl


def test_watts_are_energy_by_time_also_when_a_counter_wraps(tmp_path: Path) -> None:
    """Packages count once each, their parts not again, and a counter that fell has wrapped."""
    now = [0.0]
    package(tmp_path, "intel-rapl:0", 100_000)
    package(tmp_path, "intel-rapl:0:0", 5, kind="core")
    package(tmp_path, "intel-rapl:1", 900_000)
    rapl = Rapl(tmp_path, lambda: now[0], lambda: 4.0 * now[0], 4)  # it has all CPUs
    assert rapl.watts() is None, "there is nothing to compare with"
    package(tmp_path, "intel-rapl:0", 300_000)
    package(tmp_path, "intel-rapl:1", 100_000)
    now[0] = 2.0
    assert rapl.watts() == pytest.approx(0.2)
    assert rapl.energy_j == pytest.approx(0.4)


def test_processes_of_a_host_count_its_packages_once(tmp_path: Path) -> None:
    """Each has the part that its CPU time is of all CPUs' time, so the sum is never more than the packages' energy."""
    now = [0.0]
    package(tmp_path, "intel-rapl:0", 0, 10**9)
    shares = (0.5, 0.25, 0.0)
    workers = [
        Rapl(tmp_path, lambda: now[0], lambda share=share: share * 8 * now[0], 8)  # type: ignore[misc]
        for share in shares
    ]
    assert [worker.watts() for worker in workers] == [None] * 3
    package(tmp_path, "intel-rapl:0", 200_000_000, 10**9)
    now[0] = 2.0
    assert [worker.watts() for worker in workers] == pytest.approx([50.0, 25.0, 0.0])
    assert sum(worker.energy_j for worker in workers) == pytest.approx(150.0)


def test_the_whole_machine_is_no_package(tmp_path: Path) -> None:
    """The zone "psys" contains the packages, so it does not count beside them, and without them nothing is known."""
    now = [0.0]
    package(tmp_path, "intel-rapl:1", 0, kind="psys")
    alone = Rapl(tmp_path, lambda: now[0], lambda: 4.0 * now[0], 4)
    package(tmp_path, "intel-rapl:0", 0)
    rapl = Rapl(tmp_path, lambda: now[0], lambda: 4.0 * now[0], 4)
    assert (alone.watts(), rapl.watts()) == (None, None)
    package(tmp_path, "intel-rapl:0", 200_000)
    package(tmp_path, "intel-rapl:1", 500_000, kind="psys")
    now[0] = 2.0
    assert alone.watts() is None
    assert rapl.watts() == pytest.approx(0.1)


@pytest.mark.parametrize("content", ["", "secret", None])
def test_what_cannot_be_read_is_unknown(tmp_path: Path, content: str | None) -> None:
    """Without packages, or with one that does not tell, no number is made up."""
    if content is not None:
        package(tmp_path, "intel-rapl:0", 1)
        package(tmp_path, "intel-rapl:1", content)
    rapl = Rapl(tmp_path, lambda: 0.0)
    assert rapl.watts() is None
    assert rapl.energy_j == 0.0
