"""A run's arrivals in the order of their times, from its configuration."""

import random
from collections.abc import Iterator, Sequence
from itertools import islice

from actorserve.errors import SimulationError
from actorserve.sim.config import ArrivalsTable, LengthsTable, RunConfig
from actorserve.sim.workload.lengths import PAIRS, parse_lengths
from actorserve.sim.workload.requests import (
    Arrival,
    LengthPairs,
    cut,
    cycle_factors,
    gamma_times,
    in_order,
    independent,
    poisson_times,
    regular_times,
    sampled,
    sampled_apart,
    spike_factors,
    trace_times,
    warped,
    with_ratio,
)
from actorserve.sim.workload.traces import MAX_TRACE_S, TraceRow


def arrivals(config: RunConfig, trace: Sequence[TraceRow]) -> Iterator[Arrival]:
    """The arrivals in order of time. Lengths and times have separate random generators, so that a rate changes no
    length.

    With a trace's times, its lengths are taken in order unless ``lengths`` says otherwise. Without its times, lengths
    are drawn from its rows.

    Raises: SimulationError, WorkloadError.
    """
    times = _times(config.arrivals, trace, random.Random(f"{config.seed} times"))
    if config.lengths.classes:
        pairs = [_independent(class_.prompt, class_.output) for class_ in config.lengths.classes]
    elif config.arrivals.process == "trace" and _in_order(config.lengths):
        pairs = [in_order(trace)]
    else:
        pairs = [_pairs(config.lengths, trace)]
    return islice(_arrivals(config, times, pairs), config.num_requests)


def _in_order(lengths: LengthsTable) -> bool:
    """Whether the trace's own lengths belong to its own times."""
    return lengths.like == "trace" and lengths.together and lengths.ratio is None


def _arrivals(config: RunConfig, times: Iterator[float], pairs: Sequence[LengthPairs]) -> Iterator[Arrival]:
    """``pairs``: of each class of the configuration, or of all requests."""
    lengths = random.Random(f"{config.seed} lengths")
    choices = random.Random(f"{config.seed} choices")  # chooses classes, priorities and prefixes
    by_priority = sorted((int(name), share) for name, share in config.priorities.items())
    names, shares = [name for name, _ in by_priority], [share for _, share in by_priority]
    classes, places = config.lengths.classes, range(len(pairs))
    class_shares, turn_s = [class_.share for class_ in classes], config.lengths.turn_s
    max_tokens = config.cluster.max_tokens
    prefixes = config.prefixes
    for at_s in times:
        if config.duration_s is not None and at_s > config.duration_s:
            return
        if turn_s is not None:
            place = int(at_s // turn_s) % len(classes)
        else:
            place = choices.choices(places, class_shares)[0] if classes else 0
        prompt, output = cut(*pairs[place](lengths), max_tokens)
        priority = names[0] if len(names) == 1 else choices.choices(names, shares)[0]
        if classes:
            yield Arrival(at_s, prompt, output, priority, place, classes[place].prefix_tokens)
        elif prefixes is None:
            yield Arrival(at_s, prompt, output, priority)
        else:
            yield Arrival(at_s, prompt, output, priority, choices.randrange(prefixes.count), prefixes.tokens)


def _times(config: ArrivalsTable, trace: Sequence[TraceRow], rng: random.Random) -> Iterator[float]:
    times = _even_times(config, trace, rng)
    if config.spike is not None:
        return warped(times, spike_factors(config.spike.at_s, config.spike.duration_s, config.spike.factor))
    if config.cycle is not None:
        return warped(times, cycle_factors(config.cycle.factors, config.cycle.each_s))
    return times


def _even_times(config: ArrivalsTable, trace: Sequence[TraceRow], rng: random.Random) -> Iterator[float]:
    if config.process == "trace":
        times = trace_times(trace, config.time_scale)
        if times and times[-1] > MAX_TRACE_S:
            raise SimulationError(
                f"arrivals.time_scale is {config.time_scale:g}: it makes the trace {times[-1] / 86_400.0:g} days long: "
                f"expected {MAX_TRACE_S / 86_400.0:.0f} at most"
            )
        return iter(times)
    if config.rate_per_s is None:
        raise SimulationError("arrivals.rate_per_s is missing: expected requests per second, here or as rates to try")
    match config.process:
        case "gamma":
            assert config.cv is not None
            return gamma_times(config.rate_per_s, config.cv, rng)
        case "regular":
            return regular_times(config.rate_per_s)
    return poisson_times(config.rate_per_s, rng)


def _pairs(config: LengthsTable, trace: Sequence[TraceRow]) -> LengthPairs:
    if config.like == "trace":
        pairs = sampled(trace) if config.together else sampled_apart(trace)
    else:
        prompt, output = PAIRS[config.like] if config.like is not None else (config.prompt, config.output)
        assert prompt is not None
        assert output is not None
        pairs = _independent(prompt, output)
    return pairs if config.ratio is None else with_ratio(pairs, config.ratio)


def _independent(prompt: str, output: str) -> LengthPairs:
    return independent(parse_lengths(prompt), parse_lengths(output))
