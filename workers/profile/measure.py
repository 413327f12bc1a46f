"""Measures an engine's times.

A machine's speed changes, by its other work, its clock and its neighbours. So each round runs all shapes, and before
each of them the same short iteration, the anchor. A shape's time is taken relative to the anchors measured next to it,
and multiplied by the median anchor of the whole run. What remains is told: each shape's spread, and how far the
anchors of the rounds drifted apart.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actorserve.core.timing.profile import Link
from workers.engine import Engine
from workers.profile.engine_timer import EngineTimer, Shape, loopback_link, memory_link
from workers.profile.plans import Plan

_NUM_NEAR = 2  # anchors before and after a shape that tell the machine's speed

Progress = Callable[[float, str], None]
"""Called with the share of the work that is done, and a description of the current work."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How many rounds over all shapes to measure after a warm-up: as many as fit into ``budget_s``, within bounds.

    Once a shape took longer than ``slow_s``, shapes that are at least as large in every respect are left out.
    """

    least_rounds: int
    most_rounds: int
    budget_s: float
    slow_s: float


QUICK = Effort(least_rounds=3, most_rounds=7, budget_s=4.0, slow_s=1.5)
THOROUGH = Effort(least_rounds=5, most_rounds=25, budget_s=60.0, slow_s=20.0)


@dataclass(frozen=True, slots=True)
class Timing:
    """The median of a shape's times, in seconds, and half the distance between their quartiles relative to it."""

    seconds: float
    spread: float


@dataclass(frozen=True, slots=True)
class Measurements:
    """The times of shapes, and the links. ``drift``: the slowest round's anchor over the fastest one's, less 1."""

    fitted: dict[Shape, Timing]
    compared: dict[Shape, Timing]
    swap: Link
    transfer: Link
    drift: float


def measure(engine: Engine, plan: Plan, effort: Effort, progress: Progress) -> Measurements:
    """Run the shapes on an engine that serves no requests. This overwrites its KV pool."""
    shapes = list(dict.fromkeys((*plan.fitted, *plan.compared)))
    with EngineTimer(engine, [plan.anchor, *shapes]) as timer:
        slow: list[Shape] = []
        times: dict[Shape, list[tuple[int, float]]] = {}  # each with the number of the anchor before it
        for number, shape in enumerate(shapes):
            progress(number / len(shapes) / (effort.least_rounds + 1), "warming up")
            if any(all(size >= least for size, least in zip(shape, slow_shape, strict=True)) for slow_shape in slow):
                continue
            times[shape] = []
            if timer.iteration_s(shape) > effort.slow_s:
                slow.append(shape)
        anchors: list[float] = []
        began = time.perf_counter()
        num_rounds, done = effort.least_rounds, 0
        while done < num_rounds:
            for number, (shape, durations) in enumerate(times.items()):
                progress((1 + done + number / len(times)) / (1 + num_rounds), _words(shape))
                anchors.append(timer.iteration_s(plan.anchor))
                durations.append((len(anchors) - 1, timer.iteration_s(shape)))
            done += 1
            round_s = max((time.perf_counter() - began) / done, 1e-9)
            num_rounds = int(min(max(effort.budget_s / round_s, effort.least_rounds), effort.most_rounds))
        progress(1.0, "copies")
        swap = timer.swap_link() if engine.num_host_blocks else memory_link()
        transfer = loopback_link()
    usual_s = statistics.median(anchors)
    near_s = [
        statistics.median(anchors[max(0, place - _NUM_NEAR) : place + _NUM_NEAR + 1]) for place in range(len(anchors))
    ]
    timings = {
        shape: _timing([seconds * usual_s / near_s[place] for place, seconds in durations])
        for shape, durations in times.items()
    }
    return Measurements(
        {shape: timings[shape] for shape in plan.fitted if shape in timings},
        {shape: timings[shape] for shape in plan.compared if shape in timings},
        swap,
        transfer,
        _drift(anchors, done),
    )


def _timing(durations_s: Sequence[float]) -> Timing:
    median_s = statistics.median(durations_s)
    first, _, third = statistics.quantiles(durations_s, n=4, method="inclusive")
    return Timing(median_s, (third - first) / 2 / median_s)


def _drift(anchors: Sequence[float], num_rounds: int) -> float:
    """A round's anchor is a median, so single disturbances are no drift."""
    size = len(anchors) // num_rounds
    rounds_s = [statistics.median(anchors[place * size : (place + 1) * size]) for place in range(num_rounds)]
    return max(rounds_s) / min(rounds_s) - 1.0


def _words(shape: Shape) -> str:
    parts = [f"prefill of {shape.num_tokens} tokens after {shape.num_before}"] if shape.num_tokens else []
    if shape.num_requests:
        parts.append(f"decode of {shape.num_requests} requests after {shape.num_context_tokens} tokens")
    return ", ".join(parts)
