"""How much memory and how many cores this process may use, on the host and in its control groups (Linux).

Control groups nest, and the limit of every group around a process applies, so the smallest limit counts. We read both
versions of control groups, because a host may run either or both. A container may show only its own part of the tree.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_UNKNOWN_MEMORY_BYTES = 4 * 2**30  # assumed if the kernel does not report it

ROOT = Path("/")


def available_memory_bytes(root: Path = ROOT) -> int:
    """Memory that this process can take without swapping, within the limits of the host and of its control groups.

    Page cache that a group could drop counts as available, as in the kernel's figure for the host.
    """
    available = next(
        (
            int(line.split()[1]) * 1024
            for line in _read(root / "proc/meminfo").splitlines()
            if line.startswith("MemAvailable:")
        ),
        _UNKNOWN_MEMORY_BYTES,
    )
    for version, folder in _groups("memory", root):
        limit_name, used_name, cache_name = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None:
            available = min(available, max(0, limit - max(0, used - _entry(folder / "memory.stat", cache_name))))
    return available


def usable_cores(root: Path = ROOT) -> int:
    """How many cores this process may keep busy, by its CPU affinity and the smallest CPU quota; at least 1.

    A quota of 2.5 cores counts as 2, because the other threads would have to wait for a throttled third thread.
    """
    cores = float(len(os.sched_getaffinity(0)))
    for version, folder in _groups("cpu", root):
        if version == 2:
            quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        else:
            quota, period = _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:  # else "max", -1, or no such file
            cores = min(cores, int(quota) / int(period))
    return max(1, math.floor(cores))


class ResidentMemory(NamedTuple):
    """This process's resident memory: the total, and the private part that it has written itself."""

    total_bytes: int
    private_bytes: int


def resident_memory(root: Path = ROOT) -> ResidentMemory:
    """Measured now; zeros if the kernel does not report it."""
    fields = _read(root / "proc/self/statm").split()[1:3]
    resident, shared = map(int, fields) if len(fields) == 2 and all(map(str.isdecimal, fields)) else (0, 0)
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return ResidentMemory(resident * page_bytes, (resident - shared) * page_bytes)


def _groups(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """The version and the folder of each control group around this process that ``controller`` may limit."""
    paths: dict[str, str] = {}  # controller ("" for version 2) -> the path of our group
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ")[:3]
        if kind == "cgroup2" and "" in paths:
            version, path = 2, paths[""]
        elif kind == "cgroup" and controller in options.split(",") and controller in paths:
            version, path = 1, paths[controller]
        else:
            continue
        shown, mount = before.split(" ")[3:5]
        top = root / mount.lstrip("/")
        # In a container the mount may begin at the container's own group, although the path begins at the host's root.
        inside = Path(path)
        inside = inside.relative_to(shown) if inside.is_relative_to(shown) else inside.relative_to("/")
        folder = top / inside
        for group in (folder, *folder.parents):
            if not group.is_relative_to(top):
                break
            yield version, group


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _number(file: Path) -> int | None:
    text = _read(file).strip()
    return int(text) if text.isdecimal() else None


def _entry(file: Path, name: str) -> int:
    for line in _read(file).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdecimal():
            return int(value)
    return 0
