"""Traces: files that say when requests came and how long they were."""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Final

from actorserve.errors import WorkloadError

MAX_TRACE_TOKENS: Final = 10_000_000
"""No model's context is this long, so a longer prompt or output means a damaged row."""

MAX_TRACE_S: Final = 31 * 86_400.0
"""The longest time from a trace's first row to its last; a longer one means a damaged row."""

_PROMPT_COLUMNS = ("ContextTokens", "num_prefill_tokens")
_OUTPUT_COLUMNS = ("GeneratedTokens", "num_decode_tokens")
_TIME_COLUMN = "TIMESTAMP"


@dataclass(frozen=True, slots=True)
class TraceRow:
    """``at_s`` counts from the trace's first row; None if the file has no times."""

    at_s: float | None
    prompt_tokens: int
    output_tokens: int


def read_trace(file: Path, num_requests: int | None = None) -> list[TraceRow]:
    """Read the first rows of a CSV file as Azure publishes them: ``TIMESTAMP,ContextTokens,GeneratedTokens``.

    Files without times, and with the columns ``num_prefill_tokens,num_decode_tokens``, are read as well. Rows without
    a prompt or an output (zero tokens) are left out, because no server serves them.

    Raises: WorkloadError, naming the file and the line.
    """
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            return list(islice(_rows(file, csv.DictReader(lines)), num_requests))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text file"
        raise WorkloadError(f"cannot read trace {file}: {reason}") from None
    except csv.Error as error:
        raise WorkloadError(f"cannot read trace {file}: {error}") from None


def _rows(file: Path, reader: "csv.DictReader[str]") -> Iterable[TraceRow]:
    columns = reader.fieldnames or []
    prompt = next((name for name in _PROMPT_COLUMNS if name in columns), None)
    output = next((name for name in _OUTPUT_COLUMNS if name in columns), None)
    if prompt is None or output is None:
        raise WorkloadError(f"trace {file}: its first line must be TIMESTAMP,ContextTokens,GeneratedTokens")
    begin: datetime | None = None
    last_s = 0.0
    for row in reader:
        where = f"trace {file}, line {reader.line_num}"
        at_s = None
        if _TIME_COLUMN in columns:
            when = _time(where, row[_TIME_COLUMN])
            begin = begin or when
            if (when.tzinfo is None) != (begin.tzinfo is None):
                raise WorkloadError(f"{where}: {_TIME_COLUMN} has a time zone, or has none, unlike the lines before it")
            at_s = (when - begin).total_seconds()
            if at_s < last_s:
                raise WorkloadError(f"{where}: {_TIME_COLUMN} is before the line above; times must not run backwards")
            if at_s > MAX_TRACE_S:
                raise WorkloadError(
                    f"{where}: {_TIME_COLUMN} is {at_s / 86_400.0:.0f} days after the first; "
                    f"a trace spans {MAX_TRACE_S / 86_400.0:.0f} days at most"
                )
            last_s = at_s
        parsed = TraceRow(at_s, _tokens(where, prompt, row[prompt]), _tokens(where, output, row[output]))
        if parsed.prompt_tokens and parsed.output_tokens:
            yield parsed


def _time(where: str, text: str | None) -> datetime:
    if not text:
        raise WorkloadError(f"{where}: {_TIME_COLUMN} is missing; every line needs a time")
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise WorkloadError(
            f"{where}: {_TIME_COLUMN} is {text[:40]!r}, not a time like 2023-11-16 18:17:03.98"
        ) from None


def _tokens(where: str, column: str, text: str | None) -> int:
    if not text:
        raise WorkloadError(f"{where}: {column} is missing; every line needs a number of tokens")
    try:
        count = int(text)
    except ValueError:
        raise WorkloadError(f"{where}: {column} is {text[:40]!r}, not a number of tokens") from None
    if not 0 <= count <= MAX_TRACE_TOKENS:
        raise WorkloadError(f"{where}: {column} is {count}, not between 0 and {MAX_TRACE_TOKENS} tokens")
    return count
