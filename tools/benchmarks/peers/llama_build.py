"""Builds llama.cpp, which measurements compare with, from its sources on PyPI.

llama-cpp-python's source distribution holds both the Python bindings and llama.cpp with its server. One build with this
machine's instruction sets serves both. The build lies in the cache folder, in an environment of its own, and serving
does not use it. ``config/constraints.txt`` pins the version.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from actorserve.model_files.default_model import cache_folder
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.paths import ROOT
from tools.figures.machine import this_machine

CONSTRAINTS = ROOT / "config" / "constraints.txt"
_NAME = "llama-cpp-python"
_CONFIGURE = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON"),
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_BUILD_UI=OFF"),
    *("-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF"),  # nothing is downloaded while building
)
# GCC before 14 takes an AMX tile configuration for 8 bytes long and drops the stores to the other 56, so llama.cpp's
# AMX kernels crash. AMX makes llama.cpp faster, so it is built without this optimization and not without AMX.
_CONFIGURE_AMX = ("-DCMAKE_C_FLAGS=-fno-tree-dse -fno-dse", "-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse")
_COUNTS = re.compile(r"\[(\d+)/(\d+)\]|\[ *(\d+)%\]")  # Ninja's progress, and make's
ADVICE = "tools/bench peers builds it"


@dataclass(frozen=True, slots=True)
class LlamaBuild:
    """llama.cpp as it was built."""

    folder: Path

    @property
    def python(self) -> Path:
        """A Python with the bindings; run it with ``environment``."""
        return self.folder / "venv" / "bin" / "python"

    @property
    def server(self) -> Path:
        return self.folder / "bin" / "llama-server"

    @property
    def environment(self) -> Mapping[str, str]:
        return {"LLAMA_CPP_LIB_PATH": str(self.folder / "bin")}

    @property
    def complete(self) -> Path:
        """A marker that is written last, so its presence means a complete build."""
        return self.folder / "complete"


def pinned_version(constraints: Path = CONSTRAINTS) -> str:
    """Raises: BenchError."""
    for line in constraints.read_text(encoding="utf-8").splitlines():
        name, _, version = line.partition("==")
        if name == _NAME:
            return version.strip()
    raise BenchError(f"{constraints} pins no {_NAME}")


def build_folder() -> Path:
    """The folder of this version's build for this CPU, because machines of several kinds may share a home."""
    machine = this_machine()
    cpu = hashlib.sha256(repr((machine.cpu, machine.isa)).encode()).hexdigest()[:8]
    return cache_folder() / "peers" / f"{_NAME}-{pinned_version()}-{cpu}"


def find_build() -> LlamaBuild | None:
    """None if llama.cpp is not built yet."""
    built = LlamaBuild(build_folder())
    return built if built.complete.exists() else None


def ensure_build(console: Console) -> LlamaBuild:
    """Build it unless it is built; two builds at once take turns. Raises: BenchError."""
    built = LlamaBuild(build_folder())
    if built.complete.exists():
        console.print(f"llama.cpp ({_NAME} {pinned_version()}) is in {built.folder}", soft_wrap=True)
        return built
    try:
        built.folder.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(built.folder.with_name(f"{built.folder.name}.lock"), console):
            if not built.complete.exists():
                _build(built, console)
    except OSError as error:
        raise BenchError(f"cannot build llama.cpp in {built.folder}: {error.strerror or error}") from None
    return built


@contextlib.contextmanager
def _one_at_a_time(lock: Path, console: Console) -> Iterator[None]:
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print("waiting for another build to end")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(built: LlamaBuild, console: Console) -> None:
    missing = [
        needed
        for needed, names in (("cmake", ("cmake",)), ("g++", (os.environ.get("CXX", "c++"), "g++", "clang++")))
        if not any(map(shutil.which, names))
    ]
    if missing:
        tools = " and ".join(missing)
        raise BenchError(f"building llama.cpp takes {tools}; apt install {' '.join(missing)}")
    shutil.rmtree(built.folder, ignore_errors=True)
    built.folder.mkdir()
    with (
        tempfile.TemporaryDirectory(dir=built.folder, prefix="build-") as scratch,
        (built.folder / "build.log").open("w+", encoding="utf-8") as log,
        Progress(console=console) as progress,
    ):
        builder = _Builder(Path(scratch), log.name, progress)
        archive = builder.download()
        builder.compile(builder.unpack(archive), built.folder / "bin")
        builder.install_bindings(archive, built)
    built.complete.touch()
    console.print(f"llama.cpp ({_NAME} {pinned_version()}) is built in {built.folder}", soft_wrap=True)


class _Builder:
    """The steps of a build, in a temporary folder. All their output is in the log."""

    def __init__(self, scratch: Path, log: str, progress: Progress) -> None:
        self._scratch = scratch
        self._log = Path(log)
        self._progress = progress

    def download(self) -> Path:
        target = self._scratch / "sdist"
        self._run(
            f"downloading {_NAME}",
            [
                *(sys.executable, "-I", "-m", "pip", "download", "--no-input", "--disable-pip-version-check"),
                *("--no-deps", "--no-binary", _NAME, "--dest", str(target), f"{_NAME}=={pinned_version()}"),
            ],
        )
        return next(target.glob("*.tar.gz"))

    def unpack(self, archive: Path) -> Path:
        """llama.cpp's folder in the archive."""
        target = self._scratch / "source"
        with tarfile.open(archive) as opened:
            opened.extractall(target, filter="data")
        sources = next(target.glob("*/vendor/llama.cpp"), None)
        if sources is None:
            raise BenchError(f"{archive.name} does not hold llama.cpp's sources")
        return sources

    def compile(self, sources: Path, target: Path) -> None:
        build = self._scratch / "cmake"
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        flags = configure_flags(this_machine().isa)
        self._run("configuring", ["cmake", "-S", str(sources), "-B", str(build), *generator, *flags])
        cores = str(len(os.sched_getaffinity(0)))
        self._run("compiling llama.cpp", ["cmake", "--build", str(build), "--target", "llama-server", "-j", cores])
        shutil.copytree(build / "bin", target, symlinks=True)

    def install_bindings(self, archive: Path, built: LlamaBuild) -> None:
        self._run("making an environment", [sys.executable, "-m", "venv", str(built.folder / "venv")])
        self._run(
            "installing the bindings",
            [
                *(str(built.python), "-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check"),
                *("--constraint", str(CONSTRAINTS), "--config-settings", "cmake.define.LLAMA_BUILD=OFF", str(archive)),
            ],
        )
        command = [str(built.python), "-I", "-c", "import llama_cpp; llama_cpp.llama_backend_init()"]
        self._run("trying it", command, built.environment)

    def _run(self, title: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Raises: BenchError, if the command fails."""
        task = self._progress.add_task(title, total=None)
        lines = []
        with (
            self._log.open("a", encoding="utf-8") as log,
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                cwd=self._scratch,
                env={**os.environ, **(environment or {})},
            ) as process,
        ):
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    log.write(line)
                    lines.append(line.strip())
                    done = share_done(line)
                    if done is not None:
                        self._progress.update(task, completed=done, total=1.0)
            finally:
                if process.poll() is None and sys.exc_info()[0] is not None:  # Ctrl-C
                    process.kill()
        if process.returncode != 0:
            told = [line for line in lines if "error" in line.lower()] or lines or ["no reason given"]
            raise BenchError(f"{title} failed: {told[0][:300]} (all of it: {self._log})")
        self._progress.update(task, completed=1.0, total=1.0)


def configure_flags(isa: Sequence[str]) -> tuple[str, ...]:
    """CMake's flags for a CPU with these instruction sets."""
    return _CONFIGURE + (_CONFIGURE_AMX if "amx_int8" in isa else ())


def share_done(line: str) -> float | None:
    """The share of a compilation that is done, from a line of Ninja's or make's output; None for other lines."""
    found = _COUNTS.match(line)
    if found is None:
        return None
    done, total, percent = found.groups()
    return int(percent) / 100 if percent else int(done) / max(1, int(total))
