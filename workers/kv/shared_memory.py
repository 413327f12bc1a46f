"""Memory that other processes of this user can map. The kernel frees it with the last process that holds it.

It has no name in any folder. Other processes reach it by ``/proc/<pid>/fd/<number>`` while its creator lives, so a
kill -9 leaves nothing behind. Its size is sealed, so a mapping cannot be cut short, which would cause a SIGBUS.
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
    """``num_bytes`` of zeros (at least 1). A page becomes resident when it is first touched, as with ``malloc``.

    ``buffer`` is the memory; it outlives this object while something else refers to it. The kernel uses huge pages if
    the host has them enabled for shared memory.

    Raises: OSError if the kernel cannot provide the memory.
    """

    def __init__(self, num_bytes: int) -> None:
        mark = secrets.token_hex(8)
        self._fd = os.memfd_create(_PREFIX + mark, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, num_bytes)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        self.buffer = mmap.mmap(self._fd, num_bytes)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self.buffer.madvise(mmap.MADV_HUGEPAGE)
        self._mark = mark
        _made.add(self)

    @property
    def shown(self) -> str:
        """The name by which another process can ``attach`` the memory."""
        return f"{os.getpid()}:{self._fd}:{self._mark}"

    @property
    def resident_bytes(self) -> int:
        """How many bytes were ever touched, by any process, and so take memory."""
        return os.fstat(self._fd).st_blocks * _BLOCK_BYTES


def resident_shared_bytes() -> int:
    """How much of the host's memory is taken by the shared memory that this process created."""
    return sum(memory.resident_bytes for memory in list(_made))


def attach(shown: str, num_bytes: int) -> mmap.mmap:
    """Map another process's memory for reading. It stays readable after that process has ended.

    Raises: ValueError if the memory does not exist, or its size is not ``num_bytes``.
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
        # By now the number may belong to another file, or the pid to another process.
        if os.readlink(f"/proc/self/fd/{fd}") != f"/memfd:{_PREFIX}{mark} (deleted)":
            raise ValueError(f"process {pid} has no such KV pool any more")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size != num_bytes:
            raise ValueError(f"the KV pool of process {pid} is not of the announced size")
        return mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ)
    except OSError as error:
        raise ValueError(f"cannot map the KV pool of process {pid}: {error.strerror}") from None
    finally:
        os.close(fd)
