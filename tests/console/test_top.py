"""``top``: the rates that it computes, what fits on the screen, and how it sorts."""

import time
from itertools import pairwise

import pytest
from rich.console import Console

from actorserve.console.top import TokenRates, picture
from actorserve.core.cluster.tables import top_table
from actorserve.core.messages import Answer, LoadReport, ModelInfo, Outcome, Peer
from actorserve.core.placement.instance_view import InstanceView


def view(number: int, tokens: int = 0) -> InstanceView:
    report = LoadReport(1, number, 0, 1000, 10 * number, 0, 10, 4, 0, num_output_tokens=tokens)
    return InstanceView(Peer(f"worker-{number}", 1), "k", ModelInfo("m", 100, 1000), report)


def answer(*views: InstanceView, reported_s: float = 0.0, now: float = 0.0) -> Answer:
    times = {one.peer: reported_s for one in views}
    return Answer("1", Outcome.DONE, "", top_table(views, times, now))


def drawn(made: object) -> list[str]:
    console = Console(width=160, force_terminal=False)
    with console.capture() as capture:
        console.print(made)
    return capture.get().splitlines()


def test_rates_come_from_counts_and_the_age_of_reports() -> None:
    """A worker's rate is its new tokens by the time between its two reports, however late they are read."""
    rates = TokenRates()
    rates.update([{"worker": "a", "output_tokens": 100, "age_s": 0.0}], 10.0)
    assert rates.update([{"worker": "a", "output_tokens": 300, "age_s": 0.5}], 12.5)["a"] == pytest.approx(100.0)


def test_a_report_that_is_read_twice_changes_no_rate() -> None:
    """Between two reports the last rate is shown, and a worker that restarted begins with 0."""
    rates = TokenRates()
    rates.update([{"worker": "a", "output_tokens": 0, "age_s": 0.0}], 0.0)
    rates.update([{"worker": "a", "output_tokens": 50, "age_s": 0.0}], 1.0)
    assert rates.update([{"worker": "a", "output_tokens": 50, "age_s": 0.5}], 1.5)["a"] == pytest.approx(50.0)
    assert rates.update([{"worker": "a", "output_tokens": 5, "age_s": 0.0}], 2.0)["a"] == 0.0


def test_only_what_fits_is_drawn() -> None:
    """The summary counts all workers, and the rows end with the screen."""
    lines = drawn(picture(answer(*map(view, range(50))), TokenRates(), 0.0, 14, "worker"))
    assert lines[0].startswith("50 workers   1225 running")
    assert len(lines) == 13


def test_rows_are_sorted_by_a_column() -> None:
    """Numbers stand with the largest first."""
    lines = drawn(picture(answer(*map(view, range(5))), TokenRates(), 0.0, 40, "running"))
    running = [int(line.split()[5]) for line in lines[3:]]
    assert running == [4, 3, 2, 1, 0]
    assert all(one >= other for one, other in pairwise(running))


def test_a_thousand_workers_are_drawn_quickly() -> None:
    """A redraw takes well under a second even on a busy machine; tools/bench measures it exactly."""
    found = answer(*map(view, range(1000)))
    began_s = time.perf_counter()
    drawn(picture(found, TokenRates(), 0.0, 60, "worker"))
    assert time.perf_counter() - began_s < 1.0
