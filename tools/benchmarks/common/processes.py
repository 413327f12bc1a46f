"""Memory and CPU time of running processes, from /proc."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)
_RSS = re.compile(r"^VmRSS:\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of several processes. Shared pages count once in PSS, and in each process in RSS.

    PSS is None if the kernel does not report it.
    """

    num_processes: int
    rss_bytes: int
    pss_bytes: int | None


def memory_of(process_ids: Iterable[int], proc: Path = _PROC) -> Memory:
    """The memory of these processes together. Processes that have ended count as 0."""
    folders = [proc / str(process_id) for process_id in process_ids]
    rss = [_kilobytes(folder / "status", _RSS) for folder in folders]
    pss = [_kilobytes(folder / "smaps_rollup", _PSS) for folder in folders]
    return Memory(
        sum(kilobytes is not None for kilobytes in rss),
        sum(kilobytes or 0 for kilobytes in rss) * 1024,
        sum(kilobytes or 0 for kilobytes in pss) * 1024 if any(pss) else None,
    )


def _kilobytes(file: Path, pattern: re.Pattern[str]) -> int | None:
    try:
        found = pattern.search(file.read_text(encoding="utf-8"))
    except OSError:
        return None
    return int(found.group(1)) if found else None


def cpu_s(process_id: int, proc: Path = _PROC) -> float:
    """The CPU time that a process has taken so far, with all its threads. Raises: OSError, if it has ended."""
    fields = (proc / str(process_id) / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
