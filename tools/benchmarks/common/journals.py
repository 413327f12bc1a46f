"""Requests and times from a server's journals (``cluster.journal_dir``)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from actorserve.core.messages import Finished, FinishReason, LoadReport, Open, Placed, Start, StepDone, Tokens
from actorserve.wire.journal import Entry, read_entries
from tools.benchmarks.common.errors import BenchError


@dataclass(frozen=True, slots=True)
class Record:
    """One request at the gateway's core."""

    arrived_s: float
    first_token_s: float
    ended_s: float
    num_prompt: int
    num_output: int


@dataclass(frozen=True, slots=True)
class Pools:
    """The sizes of a worker's KV pools, as the worker reports them."""

    kv_tokens: int
    host_kv_tokens: int
    tokens_per_block: int
    bytes_per_token: int


def entries_of(folder: Path, process: str) -> Iterator[Entry]:
    """The entries of all incarnations of a process. Raises: BenchError, if it left no journal."""
    files = sorted(folder.glob(f"{process}-*.journal"))
    if not files:
        raise BenchError(f"{process} left no journal in {folder}")
    for file in files:
        with file.open("rb") as opened:
            yield from read_entries(opened)


def records_of(entries: Iterator[Entry], salt: str) -> list[Record]:
    """The requests with this ``cache_salt``, in order of arrival. Raises: BenchError, if a request did not end."""
    arrived: dict[str, float] = {}
    first: dict[str, float] = {}
    num_prompt: dict[str, int] = {}
    num_output: dict[str, int] = {}
    ended: dict[str, float] = {}
    for entry in entries:
        match entry.message:
            case Open(request=request) if request.cache_salt == salt:
                arrived[request.request_id] = entry.now
                num_prompt[request.request_id] = len(request.prompt_token_ids)
            case Tokens(request_ids=request_ids, positions=positions, run_lengths=run_lengths):
                for request_id, position, length in zip(
                    request_ids, positions, run_lengths or (1,) * len(positions), strict=True
                ):
                    first.setdefault(request_id, entry.now)
                    num_output[request_id] = max(position + length, num_output.get(request_id, 0))
            case Finished(request_id=request_id, reason=FinishReason.LENGTH):
                ended.setdefault(request_id, entry.now)
    if unfinished := arrived.keys() - ended.keys():
        raise BenchError(f"{len(unfinished)} of {len(arrived)} requests have no end in the gateway's journal")
    return [
        Record(at_s, first[request_id], ended[request_id], num_prompt[request_id], num_output[request_id])
        for request_id, at_s in arrived.items()
    ]


def message_s(gateway: Iterable[Entry], worker: Iterable[Entry]) -> float:
    """The median time of a message between these two processes, of the same host: from the decision to send it until
    the other core gets it.

    Messages to the worker are those that start requests, and messages from it are their first tokens.

    Raises: BenchError, if no such message came.
    """
    placed: dict[str, float] = {}
    came: dict[str, float] = {}
    for entry in gateway:
        match entry.message:
            case Placed(request_id=request_id):
                placed.setdefault(request_id, entry.now)
            case Tokens(request_ids=request_ids):
                for request_id in request_ids:
                    came.setdefault(request_id, entry.now)
    trips_s: list[float] = []
    for entry in worker:
        match entry.message:
            case Start(request=request):
                sent_s = placed.pop(request.request_id, None)
                if sent_s is not None:
                    trips_s.append(entry.now - sent_s)
            case StepDone(request_ids=request_ids):
                firsts = [first_s for each in request_ids if (first_s := came.pop(each, None)) is not None]
                trips_s += (first_s - entry.now for first_s in firsts)
    if not trips_s:
        raise BenchError("the journals tell of no request that started")
    return max(0.0, median(trips_s))


def between_steps_s(entries: Iterator[Entry]) -> float:
    """The trimmed mean time from the end of one iteration to the start of the next, on a worker that mostly has work.

    Raises: BenchError.
    """
    ends = [(entry.now, entry.message.duration_s) for entry in entries if isinstance(entry.message, StepDone)]
    gaps_s = [now - duration_s - before for (before, _), (now, duration_s) in pairwise(ends)]
    if not gaps_s:
        raise BenchError("the worker ran no two iterations")
    return max(0.0, _trimmed_mean(gaps_s))


def _trimmed_mean(values: Sequence[float]) -> float:
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
