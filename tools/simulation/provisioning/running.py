"""Runs the search of each design in a process of its own, and checks the frontier with more seeds."""

import gc
import multiprocessing
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from tools.simulation.experiment import SLO, Goal
from tools.simulation.provisioning.plan import Design, Measure, Provisioning
from tools.simulation.provisioning.search import Counts, Size, frontier, smallest_sizes
from tools.simulation.runner import holds, run_once

_GOAL = Goal(metric=SLO)


@dataclass(frozen=True, slots=True)
class Tried:
    """A size that was simulated with one seed, and the limits that it broke."""

    design: str
    counts: Counts
    seed: int
    is_held: bool
    breaks: tuple[str, ...]


@dataclass(frozen=True)
class Provisioned:
    """``sizes``: the smallest of each design by the first seed. ``frontier``: those that no other beats, and that most
    of the seeds hold.
    """

    tried: list[Tried]
    sizes: list[Size]
    frontier: list[Size]

    def best(self, least: Measure) -> Size | None:
        """The size on the frontier with the least cost, or power. None if no design holds the load."""
        by_cost = [(size.cost_per_hour, size.watts, size) for size in self.frontier]
        by_watts = [(size.watts, size.cost_per_hour, size) for size in self.frontier]
        chosen = by_cost if least == "cost" else by_watts
        return min(chosen, key=lambda item: item[:2])[2] if chosen else None


def provision(provisioning: Provisioning, num_processes: int, report: Callable[[Tried], None]) -> Provisioned:
    """``report`` is called on this thread when a design's search has ended, with all that it tried."""
    table = provisioning.table
    designs = {design.table.name: design for design in provisioning.designs}
    tried: list[Tried] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context, _begin_process) as pool:
        searches = [pool.submit(search_design, design, table.rate_per_s) for design in designs.values()]
        sizes: list[Size] = []
        for search in searches:
            found, tries = search.result()
            sizes += found
            tried += tries
            for one in tries:
                report(one)

        def is_sure(size: Size) -> bool:
            """Whether most of the seeds hold it. The first one does."""
            design = designs[size.design]
            checks = [pool.submit(try_size, design, size.counts, table.rate_per_s, seed) for seed in table.edge_seeds]
            results = [check.result() for check in checks]
            for one in results:
                tried.append(one)
                report(one)
            return 2 * (1 + sum(one.is_held for one in results)) > 1 + len(results)

        asked: dict[Size, bool] = {}

        def is_sure_once(size: Size) -> bool:
            if size not in asked:
                asked[size] = is_sure(size)
            return asked[size]

        return Provisioned(tried, sizes, frontier(sizes, is_sure_once))


def search_design(design: Design, rate_per_s: float) -> tuple[list[Size], list[Tried]]:
    """The design's smallest sizes, and all sizes that were tried."""
    tried: list[Tried] = []

    def is_held(counts: Counts) -> bool:
        tried.append(try_size(design, counts, rate_per_s, design.case.config.seed))
        return tried[-1].is_held

    found = smallest_sizes([group.counts for group in design.table.groups], is_held)
    name = design.table.name
    return [Size(name, counts, design.cost_per_hour(counts), design.watts(counts)) for counts in found], tried


def try_size(design: Design, counts: Counts, rate_per_s: float, seed: int) -> Tried:
    figures = run_once(design.sized(counts).with_seed(seed), rate_per_s, lambda share: None)
    return Tried(design.table.name, counts, seed, holds(figures, _GOAL), tuple(figures["slo"]["breaks"]))


def _begin_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the process that started this one
    gc.freeze()
    gc.disable()  # run_once collects what a run leaves
