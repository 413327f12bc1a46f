"""Memory that other processes of this user can map, and that goes with the last process that holds it.

It has no name in any folder: others reach it by ``/proc/<pid>/fd/<number>`` as long as its maker lives, so that a
kill -9 leaves nothing behind. Its size is sealed: a mapping of it can never be cut short, which would be a SIGBUS.
"""

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import weakref

_PREFIX = "actorserve-kv-"
_SHOWN = re.compile(r"(\d{1,10}):(\d{1,10}):([0-9a-f]{16})", re.ASCII)
_BLOCK_BYTES = 512  # the unit of st_blocks
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_made: "weakref.WeakSet[SharedMemory]" = weakref.WeakSet()


class SharedMemory:
    """``num_bytes`` of zeros (at least 1). Pages become resident as they are first touched, as those of ``malloc``.

    ``buffer`` is the memory; it outlives this object where something else holds it. Huge pages are asked for, which
    the kernel gives where the host has them switched on for shared memory.

    Raises: OSError where the kernel has no such memory to give.
    """

    def __init__(self, num_bytes: int) -> None:
        mark = secrets.token_hex(8)
        self._fd = os.memfd_create(_PREFIX + mark, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, num_bytes)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        self.buffer = mmap.mmap(self._fd, num_bytes)
        with contextlib.suppress(OSError):  # a kernel without them
            self.buffer.madvise(mmap.MADV_HUGEPAGE)
        self._mark = mark
        _made.add(self)

    @property
    def shown(self) -> str:
        """What ``attach`` takes in another process."""
        return f"{os.getpid()}:{self._fd}:{self._mark}"

    @property
    def resident_bytes(self) -> int:
        """How much of it was ever touched, and so takes memory, whoever maps it."""
        return os.fstat(self._fd).st_blocks * _BLOCK_BYTES


def resident_shared_bytes() -> int:
    """What the shared memory that this process made takes of the host's."""
    return sum(memory.resident_bytes for memory in list(_made))


def attach(shown: str, num_bytes: int) -> mmap.mmap:
    """Map another process's memory, to read; it stays readable when that process has ended.

    Raises: ValueError where there is no such memory, or it is not of ``num_bytes``.
    """
    found = _SHOWN.fullmatch(shown)
    if found is None:
        raise ValueError(f"not the name of shared memory: {shown[:80]!r}")
    pid, number, mark = found.groups()
    path = f"/proc/{pid}/fd/{number}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"cannot map the KV pool of process {pid}: {error.strerror}") from None
    try:
        # The number may be another file's by now, or another process's.
        if os.readlink(f"/proc/self/fd/{fd}") != f"/memfd:{_PREFIX}{mark} (deleted)":
            raise ValueError(f"process {pid} has no such KV pool any more")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size != num_bytes:
            raise ValueError(f"the KV pool of process {pid} is not of the size that it tells")
        return mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ)
    except OSError as error:
        raise ValueError(f"cannot map the KV pool of process {pid}: {error.strerror}") from None
    finally:
        os.close(fd)
