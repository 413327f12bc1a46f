"""The requests of a measurement: when each arrives, how long its prompt is, how many tokens it makes. Seeded."""

import csv
import random
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

from tools.benchmarks.errors import BenchError
from tools.benchmarks.lengths import Lengths

_PROMPT_COLUMNS = ("ContextTokens", "num_prefill_tokens")
_OUTPUT_COLUMNS = ("GeneratedTokens", "num_decode_tokens")
_WORDS = (
    *("the", "of", "and", "to", "in", "is", "was", "for", "that", "with", "as", "on", "at", "by", "from", "his", "her"),
    *("they", "we", "you", "it", "are", "this", "have", "not", "but", "had", "one", "all", "were", "when", "who"),
    *("will", "more", "no", "if", "out", "so", "what", "up", "about", "into", "than", "them", "can", "only", "other"),
    *("time", "new", "some", "could", "these", "two", "may", "first", "then", "do", "any", "like", "my", "now", "over"),
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. ``at_s`` counts from the beginning; a closed loop ignores it."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class TraceRow:
    """``at_s`` counts from the trace's first row; None where the file has no times."""

    at_s: float | None
    prompt_tokens: int
    output_tokens: int


def read_trace(file: Path, num_requests: int | None = None) -> list[TraceRow]:
    """Read the first rows of a CSV file as Azure publishes them: ``TIMESTAMP,ContextTokens,GeneratedTokens``.

    Files without times, and with the columns ``num_prefill_tokens,num_decode_tokens``, are read as well. Rows without
    a prompt or an output are left out: no server makes them.

    Raises: BenchError, naming the file and the line.
    """
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            return list(islice(_rows(file, csv.DictReader(lines)), num_requests))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text file"
        raise BenchError(f"cannot read trace {file}: {reason}") from None
    except csv.Error as error:
        raise BenchError(f"cannot read trace {file}: {error}") from None


def _rows(file: Path, reader: "csv.DictReader[str]") -> Iterable[TraceRow]:
    columns = reader.fieldnames or []
    prompt = next((name for name in _PROMPT_COLUMNS if name in columns), None)
    output = next((name for name in _OUTPUT_COLUMNS if name in columns), None)
    if prompt is None or output is None:
        raise BenchError(f"trace {file}: its first line must be TIMESTAMP,ContextTokens,GeneratedTokens")
    begin: datetime | None = None
    for row in reader:
        try:
            at_s = None
            if "TIMESTAMP" in columns:
                when = datetime.fromisoformat(row["TIMESTAMP"])
                begin = begin or when
                at_s = (when - begin).total_seconds()
            parsed = TraceRow(at_s, int(row[prompt]), int(row[output]))
        except (ValueError, TypeError):
            raise BenchError(f"trace {file}, line {reader.line_num}: not a time and two numbers") from None
        if parsed.prompt_tokens > 0 and parsed.output_tokens > 0:
            yield parsed


def poisson_times_s(rate_per_s: float, count: int, rng: random.Random) -> list[float]:
    """Arrival times of a Poisson process: gaps are independent, exponential, with mean ``1 / rate_per_s``."""
    at_s = 0.0
    times = []
    for _ in range(count):
        at_s += rng.expovariate(rate_per_s)
        times.append(at_s)
    return times


def synthetic(prompts: Lengths, outputs: Lengths, count: int, rate_per_s: float | None, seed: int) -> list[Arrival]:
    """Requests with drawn lengths; Poisson arrivals, or all at once for a closed loop (``rate_per_s`` None)."""
    times, lengths = random.Random(f"{seed} times"), random.Random(f"{seed} lengths")
    at_s = [0.0] * count if rate_per_s is None else poisson_times_s(rate_per_s, count, times)
    return [Arrival(each, prompts.draw(lengths), outputs.draw(lengths)) for each in at_s]


def replayed(
    rows: list[TraceRow],
    rate_per_s: float | None,
    closed_loop: bool,
    time_scale: float,
    max_tokens: int | None,
    seed: int,
) -> list[Arrival]:
    """A trace's requests at its own times (``time_scale`` 0.5: twice as fast), or with its lengths alone.

    ``max_tokens`` bounds prompt + output: longer requests are cut, the prompt first.

    Raises: BenchError, where times are wanted and the trace has none.
    """
    if closed_loop:
        times = [0.0] * len(rows)
    elif rate_per_s is not None:
        times = poisson_times_s(rate_per_s, len(rows), random.Random(f"{seed} times"))
    else:
        if any(row.at_s is None for row in rows):
            raise BenchError("the trace has no times; give --rate or --concurrency")
        times = [(row.at_s or 0.0) * time_scale for row in rows]
    arrivals = []
    for at_s, row in zip(times, rows, strict=True):
        prompt, output = row.prompt_tokens, row.output_tokens
        if max_tokens is not None:
            output = min(output, max_tokens - 1)
            prompt = min(prompt, max_tokens - output)
        arrivals.append(Arrival(at_s, prompt, output))
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def prompt_token_ids(count: int, id_range: tuple[int, int], rng: random.Random) -> list[int]:
    """Token ids from the half-open range."""
    return [rng.randrange(*id_range) for _ in range(count)]


def prompt_text(count: int, rng: random.Random) -> str:
    """About ``count`` tokens of text: words that most tokenizers take for one token each."""
    return " ".join(rng.choice(_WORDS) for _ in range(count))
