"""The one bootstrap behind tools/*: makes ``.venv``, installs pinned dependencies into it, runs the command there.

Standard library only, because it runs before anything is installed. ``pyproject.toml`` names the packages, and
``config/constraints.txt`` their versions. A stamp in ``.venv``, written last, marks an installation as complete and up
to date: a second start installs nothing, and an interrupted installation is repeated. Two installations take turns.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNTIME = "runtime"
TEST = "test"
MAX_TEST_PROCESSES = 8
COMPILED = "ACTORSERVE_COMPILED"  # tools.compiling
NO_COMPILER = 3  # the exit status of tools/compile on a machine that cannot compile
COMPILED_TESTS = ("tests/core", "tests/tools/test_compiling.py")
"""What also runs on the compiled core."""
COMMANDS = {
    "serve": RUNTIME,
    "test": TEST,
    "check": TEST,
    "bench": TEST,
    "gpu-first-hour": TEST,
    "simulate": TEST,
    "compile": TEST,
    "clients": TEST,
    "fuzz": TEST,
    "profile": RUNTIME,
}


class SetupError(Exception):
    """Ends the installation. The text is one line that says what to do."""


def say(text: str) -> None:
    print(f"actorserve: {text}", file=sys.stderr, flush=True)


def dependencies(root: Path, group: str) -> list[str]:
    """The packages that ``pyproject.toml`` needs; the test group includes the runtime's."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = list(project["dependencies"])
    if group == TEST:
        wanted += project["optional-dependencies"]["test"]
    return wanted


def python_of(root: Path) -> Path:
    return root / ".venv" / "bin" / "python"


def program_of(root: Path) -> Path:
    return root / ".venv" / "bin" / "actorserve"


def describe_python(python: Path) -> str | None:
    """Version and folder of the virtual environment's Python; None if it does not work."""
    # -I ignores the caller's PYTHON* variables. The version matters because a distribution's upgrade replaces Python.
    command = [str(python), "-I", "-c", "import sys, pip; print(sys.version, sys.prefix)"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def fingerprint(root: Path, group: str, python: str) -> str:
    """Hash of everything that determines the installed packages."""
    pins = (root / "config" / "constraints.txt").read_text(encoding="utf-8")
    parts = [pins, *dependencies(root, group), python]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def stamp_of(root: Path, group: str) -> Path:
    return root / ".venv" / f"actorserve-{group}.stamp"


def is_current(root: Path, group: str) -> bool:
    try:
        stamp = stamp_of(root, group).read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    python = describe_python(python_of(root))
    return python is not None and program_of(root).exists() and stamp == fingerprint(root, group, python)


@contextlib.contextmanager
def one_at_a_time(root: Path) -> Iterator[int]:
    """Hold the installation's lock, and yield its descriptor.

    The lock is on the ``tools`` folder itself, so no lock file remains. It ends with the last process that holds it.
    """
    descriptor = os.open(root / "tools", os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another installation to end")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def make_environment(root: Path) -> None:
    """Make an empty ``.venv``, in place of an old one."""
    try:
        import ensurepip  # noqa: F401 - Debian and Ubuntu package it separately, and venv fails late without it
        import venv  # noqa: F401
    except ImportError:
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
        raise SetupError(f"Python's venv module is missing; install it with: apt install {package}") from None
    say("making .venv")
    command = [sys.executable, "-m", "venv", "--clear", str(root / ".venv")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        raise SetupError(f"cannot make .venv: {reason[-1]}")


def install(root: Path, group: str, lock: int) -> None:
    """Install a group's dependencies, put the repository's root on the ``sys.path`` of ``.venv``, and make the program
    ``actorserve`` there.
    """
    wanted = dependencies(root, group)
    say(f"installing dependencies ({group} set, {len(wanted)} packages and their dependencies); this is needed once")
    command = [str(python_of(root)), "-I", "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    if not sys.stderr.isatty():
        command.append("-qq")  # on a terminal pip shows its progress
    command += ["--constraint", str(root / "config" / "constraints.txt"), *wanted]
    # pip inherits the lock: if only this process is killed, a second start still waits for pip.
    done = subprocess.run(command, stdout=sys.stderr, pass_fds=[lock], check=False)
    if done.returncode != 0:
        raise SetupError("installing failed, for the reason above; run the command again to retry")
    query = [str(python_of(root)), "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site_packages = Path(subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip())
    (site_packages / "actorserve.pth").write_text(f"{root}\n", encoding="utf-8")
    program = program_of(root)
    program.write_text(f"#!/bin/sh\nexec '{python_of(root)}' -P -m actorserve \"$@\"\n", encoding="utf-8")
    program.chmod(0o755)


def ensure(root: Path, group: str) -> None:
    """Make ``.venv`` hold the group's dependencies. Quick and silent if it does already.

    Raises: SetupError.
    """
    if is_current(root, group):
        return
    with one_at_a_time(root) as lock:
        if is_current(root, group):  # another process has just installed them
            return
        python = describe_python(python_of(root))
        if python is None:
            make_environment(root)
            python = describe_python(python_of(root))
            if python is None:
                raise SetupError(f"{root / '.venv'} does not work; remove it and run the command again")
        complete = [RUNTIME, TEST] if group == TEST else [RUNTIME]
        for name in complete:
            stamp_of(root, name).unlink(missing_ok=True)
        install(root, group, lock)
        for name in complete:
            unfinished = stamp_of(root, name).with_suffix(".new")
            unfinished.write_text(fingerprint(root, name, python), encoding="utf-8")
            unfinished.replace(stamp_of(root, name))
        say("dependencies are installed")


def absolute_paths(arguments: Sequence[str], root: Path) -> list[str]:
    """Make the caller's relative paths absolute, because pytest runs in the root."""
    here = Path.cwd()
    if here == root:
        return list(arguments)
    result = []
    for argument in arguments:
        path, separator, test = argument.partition("::")
        meant = not argument.startswith("-") and (here / path).exists()
        result.append(f"{here / path}{separator}{test}" if meant else argument)
    return result


def run_checks(python: str, arguments: Sequence[str]) -> int:
    """Run every check, also after a failure. Returns an exit status."""
    if arguments:
        raise SetupError("tools/check takes no arguments")
    checks = {
        "ruff format": ["-m", "ruff", "format", "--check", "."],
        "ruff check": ["-m", "ruff", "check", "."],
        "mypy --strict": ["-m", "mypy", "--strict"],
        "layers": ["-m", "pytest", "tests/test_layers.py", "tests/test_folders.py"],
    }
    failed = []
    for name, command in checks.items():
        say(f"check: {name}")
        if subprocess.run([python, *command], check=False).returncode != 0:
            failed.append(name)
    if failed:
        say(f"check: failed: {', '.join(failed)}")
    return 1 if failed else 0


def run_tests(python: str, arguments: Sequence[str]) -> int:
    """Run pytest with ``arguments``; without any, run all tests. Returns an exit status.

    All tests run in two parts at once. Tests that start processes mostly wait, so they run one after the other at
    normal priority. The other tests use what is left of all cores at low priority, and so does the compiler of the
    core; their output follows at the end. Then the core's tests run once more, on that build.
    """
    # The tests start hundreds of processes. Each would compile our sources again if it could not keep the result.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    pytest = [python, "-P", "-m", "pytest"]
    if arguments:
        os.execv(python, [*pytest, *arguments])
    num_processes = min(len(os.sched_getaffinity(0)), MAX_TEST_PROCESSES)
    spread = ["-n", str(num_processes), "--dist", "worksteal"]
    os.environ[COMPILED] = "0"
    say(f"test: tests that start processes; the others at low priority on {num_processes} cores")
    with (
        at_low_priority([*pytest, "-m", "not serial", *spread]) as others,
        at_low_priority([python, "-P", "-m", "tools.compiling"]) as build,
    ):
        failed = subprocess.run([*pytest, "-m", "serial and not compiled"], check=False).returncode
        say("test: the other tests")
        failed = others() or failed
        say("test: the core, compiled")
        return run_compiled_tests(python, build(), spread) or failed


@contextlib.contextmanager
def at_low_priority(command: Sequence[str]) -> Iterator[Callable[[], int]]:
    """Run a command beside others. The function waits for its end, shows its output, and returns its exit status."""
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(["nice", "-n", "10", *command], stdout=output, stderr=subprocess.STDOUT) as process,
    ):

        def end() -> int:
            status = process.wait()
            output.seek(0)
            shutil.copyfileobj(output, sys.stdout.buffer)
            sys.stdout.buffer.flush()
            return status

        yield end


def run_compiled_tests(python: str, built: int, spread: Sequence[str]) -> int:
    """Run the core's tests on its build; ``built`` is the compiler's exit status. Returns an exit status.

    Without a compiler the compiled core cannot be tested here, and that is no failure.
    """
    if built == NO_COMPILER:
        say("test: SKIPPED: the core's tests on the compiled core, because this machine has no C compiler")
        return 0
    if built != 0:
        return built
    # Other histories of faults than those that were tested on the interpreted core.
    command = [python, "-P", "-m", "pytest", *COMPILED_TESTS, "--first-fault-example", "100", *spread]
    return subprocess.run(command, env={**os.environ, COMPILED: "1"}, check=False).returncode


def main(arguments: Sequence[str]) -> int:
    name, *rest = arguments
    python = str(python_of(ROOT))
    if name == "install":  # it needs no packages, and runs on hosts that shall not get a .venv here
        os.environ["PYTHONPATH"] = str(ROOT)
        os.execv(sys.executable, [sys.executable, "-P", "-m", "tools.installing", *rest])
    try:
        ensure(ROOT, COMMANDS[name])
        # -P: a file in the caller's folder cannot replace a module of the same name.
        if name == "serve":
            os.execv(python, [python, "-P", "-m", "actorserve", "serve", *rest])
        if name == "bench":
            os.execv(python, [python, "-P", "-m", "tools.benchmarks", *rest])
        if name == "gpu-first-hour":
            os.execv(python, [python, "-P", "-m", "tools.benchmarks.gpu.first_hour", *rest])
        if name == "profile":
            os.execv(python, [python, "-P", "-m", "tools.profiling", *rest])
        if name == "compile":
            os.execv(python, [python, "-P", "-m", "tools.compiling", *rest])
        if name == "simulate":
            os.environ.setdefault(COMPILED, "1")
            os.execv(python, [python, "-P", "-m", "tools.simulation", *rest])
        if name == "fuzz":
            os.execv(python, [python, "-P", "-m", "tools.fuzzing", *rest])
        if name == "clients":
            os.execv(python, [python, "-P", "-m", "tools.compatibility", *rest])
        if name == "check":
            os.chdir(ROOT)
            return run_checks(python, rest)
        rest = absolute_paths(rest, ROOT)
        os.chdir(ROOT)
        return run_tests(python, rest)
    except SetupError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next start carries on")
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
