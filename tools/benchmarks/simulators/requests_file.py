"""The requests that both simulators get: drawn as SplitwiseSim draws them, and written for each simulator to read."""

import csv
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

from actorserve.sim.arrivals import arrivals
from actorserve.sim.config import parse_run
from actorserve.sim.workload.traces import TraceRow

_BEGIN = datetime(2023, 11, 16)  # of our file, whose rows have dates
_TEXT_GENERATION = 2  # the only type of request that SplitwiseSim serves


def draw(
    trace: Sequence[TraceRow], rate_per_s: float, duration_s: float, seed: int, *, together: bool
) -> list[TraceRow]:
    """Requests of a Poisson process, with lengths of the trace's rows.

    SplitwiseSim draws prompts and outputs independently. ``together``: each output comes from its prompt's row. The
    times do not depend on it. They are whole microseconds.
    """
    values = {
        "seed": seed,
        "duration_s": duration_s,
        "trace": "drawn from",
        "cluster": {"profile": "any", "kv_tokens": 10**7, "max_context_tokens": 10**7},
        "arrivals": {"process": "poisson", "rate_per_s": rate_per_s},
        "lengths": {"like": "trace", "together": together},
    }
    drawn = arrivals(parse_run(values, "requests"), trace)
    return [TraceRow(round(arrival.at_s, 6), arrival.prompt_tokens, arrival.output_tokens) for arrival in drawn]


def write_for_theirs(requests: Sequence[TraceRow], file: Path) -> None:
    """Raises: OSError."""
    columns = ("request_id", "request_type", "application_id", "arrival_timestamp", "batch_size", "prompt_size")
    with file.open("w", newline="", encoding="utf-8") as text:
        writer = csv.writer(text)
        writer.writerow((*columns, "token_size"))
        for number, row in enumerate(requests):
            writer.writerow((number, _TEXT_GENERATION, 0, row.at_s, 1, row.prompt_tokens, row.output_tokens))


def write_for_ours(requests: Sequence[TraceRow], file: Path) -> None:
    """Raises: OSError."""
    with file.open("w", newline="", encoding="utf-8") as text:
        writer = csv.writer(text)
        writer.writerow(("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
        for row in requests:
            at = _BEGIN + timedelta(seconds=row.at_s or 0.0)
            writer.writerow((at.isoformat(" "), row.prompt_tokens, row.output_tokens))
