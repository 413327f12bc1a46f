"""Traces: files that say when requests came and how long they were."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Final, TextIO

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
    a prompt or an output (zero tokens) are left out, because no server serves them. Lines may end as on Windows, the
    last one may have no end, and the file may begin with a byte order mark.

    Raises: WorkloadError, naming the file and the line; also if there is no request.
    """
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            rows = list(islice(_rows(file, lines), num_requests))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text file"
        raise WorkloadError(f"cannot read trace {file}: {reason}") from None
    if not rows:
        raise WorkloadError(f"trace {file}: there are no requests in it: expected lines with a prompt and an output")
    return rows


def _rows(file: Path, lines: TextIO) -> Iterator[TraceRow]:
    found = _lines(file, lines)
    _, columns = next(found, ("", ()))
    prompt, output = (_column(file, columns, names) for names in (_PROMPT_COLUMNS, _OUTPUT_COLUMNS))
    time = columns.index(_TIME_COLUMN) if _TIME_COLUMN in columns else None
    begin: datetime | None = None
    last_s = 0.0
    for where, row in found:
        if len(row) != len(columns):
            raise WorkloadError(f"{where}: {len(row)} values: expected {len(columns)}, as in the first line")
        at_s = None
        if time is not None:
            when = _time(where, row[time])
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
        parsed = TraceRow(
            at_s, _tokens(where, columns[prompt], row[prompt]), _tokens(where, columns[output], row[output])
        )
        if parsed.prompt_tokens and parsed.output_tokens:
            yield parsed


def _lines(file: Path, lines: TextIO) -> Iterator[tuple[str, Sequence[str]]]:
    """The values of each line that is not empty, after its place for errors."""
    reader = csv.reader(lines, strict=True)
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise WorkloadError(f"trace {file}, line {reader.line_num}: {error}") from None
        if row is None:
            return
        if row:
            yield f"trace {file}, line {reader.line_num}", row


def _column(file: Path, columns: Sequence[str], names: Sequence[str]) -> int:
    """The place of the one column with one of these names."""
    found = [place for place, column in enumerate(columns) if column in names]
    if len(found) != 1:
        shown = repr(",".join(columns)[:80]) if columns else "nothing"
        raise WorkloadError(
            f"trace {file}: its first line must be {_TIME_COLUMN},{_PROMPT_COLUMNS[0]},{_OUTPUT_COLUMNS[0]}, "
            f"but is {shown}: expected one column {' or '.join(names)}"
        )
    return found[0]


def _time(where: str, text: str) -> datetime:
    if not text:
        raise WorkloadError(f"{where}: {_TIME_COLUMN} is missing; every line needs a time")
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise WorkloadError(
            f"{where}: {_TIME_COLUMN} is {text[:40]!r}, not a time like 2023-11-16 18:17:03.98"
        ) from None


def _tokens(where: str, column: str, text: str) -> int:
    if not text:
        raise WorkloadError(f"{where}: {column} is missing; every line needs a number of tokens")
    try:
        count = int(text if "_" not in text else "")  # Python reads 1_000
    except ValueError:
        raise WorkloadError(f"{where}: {column} is {text[:40]!r}, not a number of tokens") from None
    if not 0 <= count <= MAX_TRACE_TOKENS:
        raise WorkloadError(f"{where}: {column} is {count}, not between 0 and {MAX_TRACE_TOKENS} tokens")
    return count
