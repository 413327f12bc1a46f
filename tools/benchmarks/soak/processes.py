"""The processes of a running server by name, and their memory and CPU time over time.

Memory is a process's own (RssAnon): neither the KV pools, whose size is set and which a worker also maps of another
worker once a request moves between them, nor the file of the weights, of which more pages are in memory over time.
"""

import asyncio
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.processes import cpu_s

SUPERVISOR: Final = "supervisor"
_EVERY_S: Final = 10.0
_SMOOTHED: Final = 6  # samples in a figure, because memory goes up and down with the requests of the moment


_OWN: Final = re.compile(r"^RssAnon:\s+(\d+) kB", re.MULTILINE)


def own_bytes(process_id: int) -> int:
    """The memory of a process that neither a file nor another process has; 0 if it has ended."""
    try:
        status = Path(f"/proc/{process_id}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    return 1024 * sum(int(kilobytes) for kilobytes in _OWN.findall(status))


def process_ids(supervisor: int, names: tuple[str, ...]) -> dict[str, int]:
    """The supervisor and its children of these names. Raises: BenchError if one is missing."""
    found = {SUPERVISOR: supervisor}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
            arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has ended
        if parent == supervisor:
            found |= {name: int(folder.name) for name in names if name in arguments}
    missing = [name for name in names if name not in found]
    if missing:
        raise BenchError(f"not running: {', '.join(missing)}")
    return found


@dataclass(slots=True)
class Watch:
    """Samples of the memory of processes, at times in seconds since the beginning."""

    ids: dict[str, int]
    times_s: list[float] = field(default_factory=list)
    used_bytes: dict[str, list[int]] = field(default_factory=dict)
    began_s: float = field(default_factory=time.monotonic)
    began_cpu_s: float = 0.0

    def __post_init__(self) -> None:
        self.used_bytes = {name: [] for name in self.ids}
        self.began_cpu_s = sum(cpu_s(number) for number in self.ids.values())

    async def keep_sampling(self) -> None:
        """Until it is cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(_EVERY_S)

    def sample(self) -> None:
        self.times_s.append(time.monotonic() - self.began_s)
        for name, number in self.ids.items():
            self.used_bytes[name].append(own_bytes(number))

    def used_at(self, name: str, time_s: float) -> float:
        """The median of the last samples before ``time_s``, in bytes."""
        until = max(1, sum(at_s <= time_s for at_s in self.times_s))
        return median(self.used_bytes[name][max(0, until - _SMOOTHED) : until])

    def cpu_share(self) -> float:
        """The share of one core that all processes took together. Raises: BenchError if one has ended."""
        try:
            used_s = sum(cpu_s(number) for number in self.ids.values()) - self.began_cpu_s
        except OSError:
            raise BenchError("a process of the server has ended; its log says why") from None
        return used_s / (time.monotonic() - self.began_s)
