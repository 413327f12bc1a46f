"""SHA-256 of weight files, kept between starts.

A model of 70 billion parameters takes a minute and a half to read and hash, at each start of each worker. So a file's
digest is kept in the cache folder, under the file's path, size, times and inode. A file that is written, replaced or
renamed has other times or another inode, because the time of the last change of status cannot be set.
"""

import hashlib
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Final

from actorserve.errors import ModelError
from actorserve.local_trust import check_file, trusted_folder
from actorserve.model_files.default_model import cache_folder
from actorserve.model_files.description import ModelDescription

_log = logging.getLogger(__name__)
_HEX: Final = re.compile(r"[0-9a-f]{64}")


def file_digest(file: Path) -> str:
    """The file's SHA-256 in hex. Raises: OSError if it cannot be read; UntrustedError for a cache of others."""
    with file.open("rb") as opened:
        before = _identity(file, os.fstat(opened.fileno()))
        kept = cache_folder() / "digests" / hashlib.sha256(before.encode()).hexdigest()
        known = _read(kept)
        if known:
            return known
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if _identity(file, os.fstat(opened.fileno())) == before:  # nothing wrote to the file meanwhile
            _keep(kept, digest)
    return digest


def weights_digest(description: ModelDescription) -> str:
    """Digest of all weight files' bytes and the config.

    Raises: ModelError if a file cannot be read.
    """
    digest = hashlib.sha256(repr(description.config).encode())
    for path in description.weight_files:
        try:
            digest.update(bytes.fromhex(file_digest(path)))
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from None
    return digest.hexdigest()


def _identity(file: Path, facts: os.stat_result) -> str:
    return f"{file.resolve()} {facts.st_dev} {facts.st_ino} {facts.st_size} {facts.st_mtime_ns} {facts.st_ctime_ns}"


def _read(kept: Path) -> str:
    """The digest that was kept; "" if there is none, or the file does not hold one. Raises: UntrustedError."""
    try:
        if not kept.exists():
            return ""
        trusted_folder(kept.parent)
        check_file(kept)
        text = kept.read_text("ascii")
    except (OSError, ValueError):
        return ""
    return text if _HEX.fullmatch(text) else ""


def _keep(kept: Path, digest: str) -> None:
    """The file appears whole, because several workers start at once."""
    try:
        trusted_folder(kept.parent)
        descriptor, partial = tempfile.mkstemp(dir=kept.parent, prefix="partial-")
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as opened:
                opened.write(digest)
            os.replace(partial, kept)
        except OSError:
            Path(partial).unlink(missing_ok=True)
            raise
    except OSError as error:
        _log.info("the next start hashes the weights again, because the digest cannot be kept: %s", error.strerror)
