"""Runs an experiment's cases in parallel processes. A case searches for its rates on its own."""

import gc
import multiprocessing
import queue
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from actorserve.sim.simulation import Simulation
from tools.simulation.experiment import SLO, Case, Experiment, Goal, Search


@dataclass(frozen=True)
class Progress:
    """A case's progress: the share of ended requests in its run at ``rate_per_s``, and how many runs are done."""

    case: int
    rate_per_s: float | None
    share: float
    num_runs: int


@dataclass
class CaseResult:
    """Figures by rate (None: the case's own arrivals); for each goal the highest rate that holds it, None for none."""

    runs: dict[float | None, dict[str, Any]] = field(default_factory=dict)
    held: list[float | None] = field(default_factory=list)


Report = Callable[[Progress], None]
_BRACKET: Final = -1  # the place of the search's shorter runs
_progress: "multiprocessing.Queue[Progress] | None" = None


def run_experiment(experiment: Experiment, num_processes: int, report: Report) -> list[CaseResult]:
    """All cases, in their order. ``report`` is called on this thread."""
    search = experiment.plan.search
    results = _run_all(experiment, [list(experiment.plan.rates)] * len(experiment.cases), search, num_processes, report)
    if search is not None and search.compare_at is not None:
        wanted: dict[str, list[float]] = {}  # those that any seed holds
        for case, result in zip(experiment.cases, results, strict=True):
            if case.arm == search.compare_at:
                wanted.setdefault(case.variant, []).extend(rate for rate in result.held if rate is not None)
        missing = [
            [rate for rate in wanted[case.variant] if rate not in result.runs]
            for case, result in zip(experiment.cases, results, strict=True)
        ]
        for result, more in zip(
            results, _run_all(experiment, missing, None, num_processes, report, only_rates=True), strict=True
        ):
            result.runs |= more.runs
    for result in results:
        result.runs = dict(sorted(result.runs.items(), key=lambda item: item[0] or 0.0))
    return results


def _run_all(
    experiment: Experiment,
    rates: list[list[float]],
    search: Search | None,
    num_processes: int,
    report: Report,
    only_rates: bool = False,
) -> list[CaseResult]:
    context = multiprocessing.get_context("spawn")
    progress: multiprocessing.Queue[Progress] = context.Queue()
    with ProcessPoolExecutor(num_processes, context, _begin_process, (progress,)) as pool:
        futures = [
            pool.submit(_run_case, number, case, rates[number], search, only_rates)
            for number, case in enumerate(experiment.cases)
        ]
        try:
            _watch(futures, progress, report)
        finally:
            if not all(future.done() for future in futures):  # interrupted, or one has failed
                pool.shutdown(wait=False, cancel_futures=True)
                for process in multiprocessing.active_children():
                    process.terminate()
    for update in _drain(progress):  # a result may overtake the last updates of its process
        report(update)
    return [future.result() for future in futures]


def _watch(futures: list[Future[CaseResult]], progress: "multiprocessing.Queue[Progress]", report: Report) -> None:
    pending = set(futures)
    while pending:
        done, pending = wait(pending, timeout=0.1)
        for update in _drain(progress):
            report(update)
        for future in done:
            future.result()  # an error ends all cases


def _drain(progress: "multiprocessing.Queue[Progress]") -> Iterator[Progress]:
    while True:
        try:
            yield progress.get_nowait()
        except queue.Empty:
            return


def _begin_process(progress: "multiprocessing.Queue[Progress]") -> None:
    global _progress
    _progress = progress
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the process that started this one
    gc.freeze()  # what is loaded stays, so that collecting what a run leaves is quick
    gc.disable()  # looking for cycles during a run takes a twentieth of the time; run_once does it afterwards


def _run_case(number: int, case: Case, rates: list[float], search: Search | None, only_rates: bool) -> CaseResult:
    result = CaseResult()
    others: dict[int, dict[float | None, dict[str, Any]]] = {}  # runs that only the search is for, by place

    def figures_at(rate: float | None, place: int = 0) -> dict[str, Any]:
        """``place``: 0 for the case's own seed, from 1 for the search's edge seeds, and ``_BRACKET``."""
        runs = others.setdefault(place, {}) if place else result.runs
        if rate not in runs:
            tell(rate, 0.0)  # making a large cluster takes a while
            runs[rate] = run_once(_varied(case, search, place), rate, lambda share: tell(rate, share))
            tell(rate, 1.0)
        return runs[rate]

    def tell(rate: float | None, share: float) -> None:
        if _progress is not None:
            num_runs = len(result.runs) + sum(map(len, others.values()))
            _progress.put(Progress(number, rate, share, num_runs))

    for rate in rates:
        figures_at(rate)
    if search is not None:
        grid = search.rates()
        for goal in search.goals:

            def is_held(rate: float, place: int = 0, goal: Goal = goal) -> bool:
                return holds(figures_at(rate, place), goal)

            found = highest_held(grid, partial(is_held, place=0 if search.bracket_s is None else _BRACKET))
            if search.edge_seeds or search.bracket_s is not None:
                found = edge_held(grid, found, 1 + len(search.edge_seeds), is_held)
            result.held.append(found)
    if not rates and search is None and not only_rates:
        figures_at(None)
    return result


def _varied(case: Case, search: Search | None, place: int) -> Case:
    """The case as the runs at this place have it."""
    if search is None or not place:
        return case
    if place == _BRACKET:
        assert search.bracket_s is not None
        return case.with_duration(search.bracket_s)
    return case.with_seed(search.edge_seeds[place - 1])


def run_once(case: Case, rate_per_s: float | None, on_share: Callable[[float], None]) -> dict[str, Any]:
    """One run's figures. ``on_share`` is called with the share of its requests that have ended."""
    config = case.at(rate_per_s)

    def on_progress(now: float, num_arrived: int, num_ended: int) -> None:
        shares = [num_ended / config.num_requests] if config.num_requests else []
        if config.arrivals.process == "trace" and case.trace:
            shares.append(num_ended / len(case.trace))
        if config.duration_s:
            shares.append(now / config.duration_s * num_ended / max(1, num_arrived))
        on_share(min(1.0, max(shares, default=0.0)))

    figures = Simulation(config, case.profiles, case.trace, on_progress).run().figures(case.service_levels())
    gc.collect()  # a simulation is a cycle, because its clients know it, and it holds the file of ended requests
    return figures


def highest_held(rates: list[float], is_held: Callable[[float], bool]) -> float | None:
    """The highest rate that is held, by bisection over growing rates; None if not even the lowest is."""
    low, high = -1, len(rates)  # held, not held
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_held(rates[middle]) else (low, middle)
    return rates[low] if low >= 0 else None


def edge_held(
    rates: list[float], found: float | None, num_seeds: int, is_held: Callable[[float, int], bool]
) -> float | None:
    """The rate near ``found`` that most of the seeds hold, and at which most of them do not hold the next higher one.

    ``is_held(rate, place)`` tells whether the seed at this place, of ``num_seeds``, holds the rate. ``found``: the
    highest rate that the seed at place 0 holds; None if it holds none, and None is returned if no rate is held.
    """

    def most_hold(rate: float) -> bool:
        num_held = 0
        for place in range(num_seeds):
            num_held += is_held(rate, place)
            if 2 * num_held > num_seeds or 2 * (num_held + num_seeds - place - 1) <= num_seeds:
                break  # the other seeds change nothing
        return 2 * num_held > num_seeds

    place = start = -1 if found is None else rates.index(found)
    while place >= 0 and not most_hold(rates[place]):
        place -= 1
    while place == start < len(rates) - 1 and most_hold(rates[place + 1]):
        place = start = place + 1
    return rates[place] if place >= 0 else None


def holds(figures: dict[str, Any], goal: Goal) -> bool:
    requests = figures["requests"]
    if requests["completed"] != requests["arrived"]:
        return False
    if goal.metric == SLO:
        return not figures["slo"]["breaks"]
    latency, _, figure = goal.metric.partition(".")
    summary = figures["latency"][latency]
    assert goal.limit is not None
    return summary is None or bool(summary[figure] <= goal.limit)
