"""Fetches files from a hub into the hub library's cache: in parallel, resumed after a cut, and checked by their hashes.

The library itself resumes only within a process, and checks sizes only. So this module brings the blobs into its cache
(``blobs/HASH``), where the library and other programs find them too. A blob lies there only after its hash was checked.
"""

import fcntl
import hashlib
import queue
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx2
from huggingface_hub.file_download import http_get
from huggingface_hub.utils._headers import build_hf_headers

from actorserve.errors import ModelError

MAX_CONNECTIONS = 8
_POLL_S = 0.2
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_CHUNK_BYTES = 2**20

Progress = Callable[[int, int], None]
"""Called repeatedly with the number of bytes that are on disk, and the total."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository. ``digest`` is its SHA-256, or the SHA-1 of its git blob; both in hexadecimal."""

    path: str
    num_bytes: int
    digest: str
    url: str


class _Stopped(Exception):  # noqa: N818 - not an error
    """Another file failed, so this transfer ends."""


class _Partial:
    """The open file of a transfer, as ``http_get`` needs it. Writing ends when the transfers are stopped."""

    def __init__(self, file: BinaryIO, stop: threading.Event) -> None:
        self._file = file
        self._stop = stop
        self.tell, self.seek, self.truncate = file.tell, file.seek, file.truncate

    def write(self, data: bytes) -> int:
        if self._stop.is_set():
            raise _Stopped
        return self._file.write(data)


def fetch(files: Sequence[RemoteFile], blobs: Path, progress: Progress | None) -> None:
    """Fetch the files that are not in ``blobs`` yet.

    A cut transfer leaves ``HASH.partial``, and the next call goes on from there.

    Raises: ModelError if the disk is too small, or a file's content is not what the hub announced; errors of the hub
    library, and OSError.
    """
    missing = list({file.digest: file for file in files if not (blobs / file.digest).exists()}.values())
    for file in missing:
        if not _HASH.fullmatch(file.digest):
            raise ModelError(f"the hub announces no hash for {file.path}")
    if not missing:
        return
    blobs.mkdir(parents=True, exist_ok=True)
    partials = [blobs / f"{file.digest}.partial" for file in missing]
    total = sum(file.num_bytes for file in missing)
    _check_space(total - sum(map(_size, partials)), blobs)
    waiting: queue.SimpleQueue[RemoteFile] = queue.SimpleQueue()
    for file in sorted(missing, key=lambda file: -file.num_bytes):
        waiting.put(file)
    results: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                file = waiting.get_nowait()
            except queue.Empty:
                return
            outcome: Exception | None = ModelError(f"a bug ended the transfer of {file.path}")
            try:
                _fetch_one(file, blobs, stop)
                outcome = None
            except (ModelError, httpx2.HTTPError, OSError, ValueError, _Stopped) as error:
                outcome = error
            finally:
                results.put(outcome)

    # Daemon threads, so that Ctrl-C ends the program while they wait for the network.
    for _ in range(min(MAX_CONNECTIONS, len(missing))):
        threading.Thread(target=work, name="hub", daemon=True).start()
    num_done = 0
    try:
        while num_done < len(missing):
            if progress is not None:
                progress(min(total, sum(map(_stored_size, partials))), total)
            try:
                failure = results.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if failure is not None:
                raise failure
            num_done += 1
    finally:
        stop.set()


def _fetch_one(file: RemoteFile, blobs: Path, stop: threading.Event) -> None:
    blob, partial = blobs / file.digest, blobs / f"{file.digest}.partial"
    with partial.open("ab", buffering=0) as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)  # another server may be fetching it
        if blob.exists():
            return
        if opened.tell() > file.num_bytes:
            opened.truncate(0)
            opened.seek(0)
        while (have := opened.tell()) < file.num_bytes:
            try:
                http_get(
                    file.url,
                    _Partial(opened, stop),  # type: ignore[arg-type]
                    resume_size=have,
                    headers=build_hf_headers(library_name="actorserve"),
                    expected_size=file.num_bytes,
                )
            except httpx2.ReadError:  # a reset connection, which the library does not try again
                if opened.tell() == have:
                    raise
        if _digest(partial, file) != file.digest:
            partial.unlink()
            raise ModelError(
                f"{file.path} is not what the hub announced (its hash differs), and was deleted; try again"
            )
        partial.replace(blob)


def _digest(path: Path, file: RemoteFile) -> str:
    digest = hashlib.sha256() if len(file.digest) == 64 else hashlib.sha1(b"blob %d\0" % file.num_bytes)
    with path.open("rb") as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _stored_size(partial: Path) -> int:
    return _size(partial) or _size(partial.with_suffix(""))


def _check_space(needed_bytes: int, folder: Path) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise ModelError(
            f"the model needs {needed_bytes / 2**20:,.0f} MiB more in {folder}, "
            f"where {free_bytes / 2**20:,.0f} MiB are free; set HF_HOME to a folder with enough space"
        )
