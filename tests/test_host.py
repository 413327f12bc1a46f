"""Available memory and cores, read from folders with files like the kernel's."""

import os
from pathlib import Path

import pytest

from actorserve.host import available_memory_bytes, resident_memory, usable_cores

CORES = 64
V2_MOUNT = "30 24 0:27 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text, encoding="ascii")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with 64 cores, 8000 KiB and control groups of version 2. This process is in /a/b."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(CORES)))
    write(tmp_path, "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:  8000 kB\n")
    write(tmp_path, "proc/self/cgroup", "0::/a/b\n")
    write(tmp_path, "proc/self/mountinfo", "22 1 0:20 / /proc rw - proc proc rw\n" + V2_MOUNT)
    return tmp_path


def test_without_limits_the_host_counts(host: Path) -> None:
    """Groups without a limit or without files do not reduce the host's memory and cores."""
    write(host, "sys/fs/cgroup/a/b/memory.max", "max\n")
    write(host, "sys/fs/cgroup/a/b/memory.current", "100\n")
    write(host, "sys/fs/cgroup/a/cpu.max", "max 100000\n")
    assert available_memory_bytes(host) == 8000 * 1024
    assert usable_cores(host) == CORES


@pytest.mark.parametrize("group", ["a/b", "a", "."])
def test_every_group_around_us_limits(host: Path, group: str) -> None:
    """The smallest limit of the groups around us counts, minus the memory that the group uses and could not drop."""
    write(host, f"sys/fs/cgroup/{group}/memory.max", "5000\n")
    write(host, f"sys/fs/cgroup/{group}/memory.current", "1000\n")
    write(host, f"sys/fs/cgroup/{group}/memory.stat", "anon 400\ninactive_file 600\n")
    write(host, f"sys/fs/cgroup/{group}/cpu.max", "200000 100000\n")
    assert available_memory_bytes(host) == 4600
    assert usable_cores(host) == 2
    write(host, "sys/fs/cgroup/memory.max", "300\n")
    write(host, "sys/fs/cgroup/memory.current", "900\n")
    write(host, "sys/fs/cgroup/memory.stat", "inactive_file 0\n")
    assert available_memory_bytes(host) == 0


@pytest.mark.parametrize(("quota", "cores"), [("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", CORES)])
def test_quotas_round_down_but_leave_one_core(host: Path, quota: str, cores: int) -> None:
    """A quota of 2.5 cores gives 2, half a core gives 1, and a quota above the number of cores has no effect."""
    write(host, "sys/fs/cgroup/a/b/cpu.max", quota + "\n")
    assert usable_cores(host) == cores


def test_version_1_limits_as_well(host: Path) -> None:
    """The hierarchies of version 1, one per controller, are read by their own names, also inside a container."""
    write(host, "proc/self/cgroup", "9:memory:/docker/c1\n4:cpu,cpuacct:/docker/c1/inner\n0::/\n")
    write(
        host,
        "proc/self/mountinfo",
        "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
        "32 31 0:29 /docker/c1 /sys/fs/cgroup/cpu ro master:3 - cgroup cgroup rw,cpu,cpuacct\n"
        "35 31 0:32 /docker/c1 /sys/fs/cgroup/memory ro master:4 - cgroup cgroup rw,memory\n",
    )
    write(host, "sys/fs/cgroup/memory/memory.limit_in_bytes", "6000\n")
    write(host, "sys/fs/cgroup/memory/memory.usage_in_bytes", "2000\n")
    write(host, "sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 500\n")
    write(host, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "400000\n")
    write(host, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    write(host, "sys/fs/cgroup/cpu/inner/cpu.cfs_quota_us", "-1\n")
    write(host, "sys/fs/cgroup/cpu/inner/cpu.cfs_period_us", "100000\n")
    assert available_memory_bytes(host) == 4500
    assert usable_cores(host) == 4


def test_our_memory_is_measured(host: Path) -> None:
    """The resident memory and its private part are measured; zeros if the kernel does not report them."""
    write(host, "proc/self/statm", "900 500 200 1 0 600 0\n")
    page = os.sysconf("SC_PAGE_SIZE")
    assert resident_memory(host) == (500 * page, 300 * page)
    for text in ("", "900 500", "900 ? 200"):
        write(host, "proc/self/statm", text)
        assert resident_memory(host) == (0, 0)
    assert resident_memory().total_bytes > resident_memory().private_bytes > 0
    assert available_memory_bytes() > 0
