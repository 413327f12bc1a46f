"""Native kernels for CPUs: a small C++ extension, built once per machine and kept in the user's cache folder.

It is optional. Without a compiler, or on a CPU other than x86-64 with AVX2, torch's own kernels do the work, slower.
`load` finds the built library or builds it; then ``torch.ops.actorserve`` holds its operators.

``ATEN_CPU_CAPABILITY=avx2`` chooses the kernels for AVX2 on any CPU, of this library and of torch itself; it must be
set before torch is loaded. To run everything as on a CPU with AVX2 alone, set ``ONEDNN_MAX_CPU_ISA=AVX2`` and
``MKL_ENABLE_INSTRUCTIONS=AVX2`` too.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import struct
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import torch

from actorserve.local_trust import check_file, open_lock, trusted_folder
from actorserve.model_files.default_model import cache_folder

_FOLDER = Path(__file__).parent
_BUILD_TIMEOUT_S = 600.0
_MAX_REASON_CHARS = 300
_ELF_HEADER_BYTES = 64
_UNUSED_DAYS = 30
_COMMON_FLAGS = ("-O3", "-std=c++20", "-fopenmp", "-ffp-contract=off")
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
_AVX512_FLAGS = (*_AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
_FLAGS = {
    "amx_int8": (*_AVX512_FLAGS, "-mamx-tile", "-mamx-int8"),
    "avx512_vnni": _AVX512_FLAGS,
    "avx2": _AVX2_FLAGS,
}


class NativeUnavailableError(Exception):
    """Why there are no native kernels here, in one line."""


def load() -> bool:
    """Whether the native kernels can be used. Builds them if this machine has not done so yet (a minute, once)."""
    return _load() == ""


def use_own_threads(wanted: bool) -> None:
    """Whether the loops of all kernels of this process are shared by threads of their own, or by OpenMP's.

    With threads of their own (``threads.h``) a busy core delays a step little. They suit a model whose layers are all
    ours: beside torch's layers they would compete with OpenMP's threads.
    """
    torch.ops.actorserve.use_own_threads(wanted)


def describe() -> str:
    """The result of `load`, in one line for a person."""
    reason = _load()
    if reason:
        return f"torch's own kernels, which are slower: {reason}"
    return f"native kernels for {isa()}"


def isa() -> str:
    """``amx_int8``, ``avx512_vnni``, ``avx2``, or "" for CPUs without kernels; bounded by ``ATEN_CPU_CAPABILITY``."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ""
    match torch.backends.cpu.get_cpu_capability():
        case "AVX512":
            found = _cpu_flags()
            if "avx512_vnni" not in found:
                return "avx2"
            return "amx_int8" if "amx_int8" in found else "avx512_vnni"
        case "AVX2":
            return "avx2"
        case _:
            return ""


def has_vnni() -> bool:
    """Whether `isa` has AVX-512's dot products of 8-bit integers."""
    return isa() in ("amx_int8", "avx512_vnni")


@cache
def digest() -> str:
    """Digest of everything that the library is made from. It names the file, and is part of a worker's kind."""
    return digest_now()


def digest_now() -> str:
    """The same digest of the sources on the disk now, which may have changed since this process started."""
    hashed = hashlib.sha256(f"{torch.__version__} {isa()} {flags()}".encode())
    for file in sources(".cpp", ".h"):
        hashed.update(file.name.encode() + file.read_bytes())
    return hashed.hexdigest()[:24]


def flags() -> tuple[str, ...]:
    """The compiler's flags for this machine's `isa`."""
    return _COMMON_FLAGS + _FLAGS[isa()]


def sources(*suffixes: str) -> list[Path]:
    return sorted(file for file in _FOLDER.iterdir() if file.suffix in suffixes)


@cache
def _load() -> str:
    try:
        torch.ops.load_library(str(_library()))  # type: ignore[no-untyped-call]
    except NativeUnavailableError as error:
        return str(error)
    except OSError as error:
        return f"the built library cannot be loaded: {error}"
    return ""


def _library() -> Path:
    """The built library's file. Raises: NativeUnavailableError; UntrustedError if others could have written it."""
    if not isa():
        raise NativeUnavailableError("the native kernels need an x86-64 CPU with AVX2")
    folder = cache_folder() / "native"
    file = folder / f"{digest()}.so"
    try:
        if _is_whole(file):
            trusted_folder(folder)
            check_file(file)
            return file
        compiler = os.environ.get("CXX", "c++")
        if shutil.which(compiler) is None:
            raise NativeUnavailableError(f"there is no C++ compiler {compiler}; install g++")
        trusted_folder(folder)
        with open_lock(folder / "build.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # several workers start at once, and one of them builds
            if not _is_whole(file):
                file.unlink(missing_ok=True)
                _remove_unused(folder)
                _build(file)
    except OSError as error:
        raise NativeUnavailableError(
            f"the native kernels cannot be built into {folder}: {error.strerror or error}"
        ) from None
    return file


def _is_whole(file: Path) -> bool:
    """Whether the file exists and reaches to the end of its ELF section headers, which come last.

    Loading a shorter file ends the process with SIGBUS.
    """
    try:
        with file.open("rb") as opened:
            header = opened.read(_ELF_HEADER_BYTES)
        size = file.stat().st_size
    except OSError:
        return False
    if len(header) < _ELF_HEADER_BYTES:
        return False
    headers_place, bytes_per_header, num_headers = struct.unpack_from("<40xQ10xHH", header)
    return header.startswith(b"\x7fELF") and headers_place + bytes_per_header * num_headers <= size


def _remove_unused(folder: Path) -> None:
    """Remove leftovers of killed builds, and libraries of other versions that are older than a month."""
    for left_over in folder.glob("build-*/"):
        shutil.rmtree(left_over, ignore_errors=True)
    oldest = time.time() - _UNUSED_DAYS * 24 * 3600
    for file in folder.glob("*.so"):
        if file.stat().st_mtime < oldest:
            file.unlink(missing_ok=True)


def _build(file: Path) -> None:
    """Build in a process of its own, because the build tools load much, and would load the unfinished library."""
    safe_path = ("-P",) if sys.flags.safe_path else ()
    command = [sys.executable, *safe_path, "-m", "workers.native.build", str(file)]
    # The build tool lies in our Python's folder, which need not be on the path.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    environment = {**os.environ, "PATH": path}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise NativeUnavailableError(f"the compiler took longer than {_BUILD_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0 or not file.is_file():
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        reason = next(
            (line for line in lines if "error: " in line), lines[-1] if lines else "the compiler printed nothing"
        )
        raise NativeUnavailableError(f"the native kernels cannot be built: {reason[:_MAX_REASON_CHARS]}")


def _cpu_flags() -> frozenset[str]:
    """The CPU's features on Linux; empty on other systems."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())
