"""What a server's journals (``cluster.journal_dir``) tell of its requests and of the time that passes around them.

Their clock counts milliseconds, so short times are means over many.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from actorserve.core.messages import Finished, FinishReason, LoadReport, Open, Placed, StepDone, Tokens
from actorserve.wire.journal import Entry, read_entries
from tools.benchmarks.common.errors import BenchError


@dataclass(frozen=True, slots=True)
class Record:
    """One request at the gateway's core."""

    arrived_s: float
    first_token_s: float
    ended_s: float
    num_output: int


@dataclass(frozen=True, slots=True)
class Pools:
    """The worker's pools of KV, as it reports them."""

    kv_tokens: int
    host_kv_tokens: int
    tokens_per_block: int
    bytes_per_token: int


def entries_of(folder: Path, process: str) -> Iterator[Entry]:
    """What the process was told in all of its lives. Raises: BenchError, where it left no journal."""
    files = sorted(folder.glob(f"{process}-*.journal"))
    if not files:
        raise BenchError(f"{process} left no journal in {folder}")
    for file in files:
        with file.open("rb") as opened:
            yield from read_entries(opened)


def records_of(entries: Iterator[Entry], salt: str) -> list[Record]:
    """The requests of this ``cache_salt``, in the order in which they came. Raises: BenchError, if one did not end."""
    came: dict[str, float] = {}
    first: dict[str, float] = {}
    num_output: dict[str, int] = {}
    ended: dict[str, float] = {}
    for entry in entries:
        match entry.message:
            case Open(request=request) if request.cache_salt == salt:
                came[request.request_id] = entry.now
            case Tokens(request_ids=request_ids, positions=positions):
                for request_id, position in zip(request_ids, positions, strict=True):
                    first.setdefault(request_id, entry.now)
                    num_output[request_id] = max(position + 1, num_output.get(request_id, 0))
            case Finished(request_id=request_id, reason=FinishReason.LENGTH):
                ended.setdefault(request_id, entry.now)
    if unfinished := came.keys() - ended.keys():
        raise BenchError(f"{len(unfinished)} of {len(came)} requests have no end in the gateway's journal")
    return [Record(at_s, first[each], ended[each], num_output[each]) for each, at_s in came.items()]


def network_s(entries: Iterator[Entry], salt: str) -> float:
    """The time of one message: half of what it takes to be placed. Raises: BenchError."""
    came: dict[str, float] = {}
    trips_s: list[float] = []
    for entry in entries:
        match entry.message:
            case Open(request=request) if request.cache_salt == salt:
                came[request.request_id] = entry.now
            case Placed(request_id=request_id) if request_id in came:
                trips_s.append(entry.now - came.pop(request_id))
    if not trips_s:
        raise BenchError("no request was placed")
    return _usual(trips_s) / 2


def between_steps_s(entries: Iterator[Entry]) -> float:
    """The usual time from the end of one iteration to the beginning of the next, of a worker that mostly has work.

    Raises: BenchError.
    """
    ends = [(entry.now, entry.message.duration_s) for entry in entries if isinstance(entry.message, StepDone)]
    gaps_s = [now - duration_s - before for (before, _), (now, duration_s) in pairwise(ends)]
    if not gaps_s:
        raise BenchError("the worker ran no two iterations")
    return max(0.0, _usual(gaps_s))


def _usual(values: Sequence[float]) -> float:
    """The mean without the highest and the lowest tenth."""
    cut = len(values) // 10
    return fmean(sorted(values)[cut : len(values) - cut])


def last_report(entries: Iterator[Entry]) -> LoadReport:
    """Raises: BenchError."""
    reports = [entry.message for entry in entries if isinstance(entry.message, LoadReport)]
    if not reports:
        raise BenchError("the worker reported no load")
    return reports[-1]


def pools_of(report: LoadReport) -> Pools:
    def tokens(num_bytes: int) -> int:
        return num_bytes // report.bytes_per_block * report.tokens_per_block

    return Pools(
        tokens(report.kv_total_bytes),
        tokens(report.host_total_bytes),
        report.tokens_per_block,
        report.bytes_per_block // report.tokens_per_block,
    )
