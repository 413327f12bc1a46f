"""``tools/compile``: build the compiled modules for these sources, unless they are built already."""

import argparse
import fcntl
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from actorserve.local_trust import open_lock, trusted_folder
from tools.compiling.builds import ROOT, build_folder

EXIT_NO_COMPILER = 3
EXIT_INTERRUPTED = 130
_UNUSED_DAYS = 30
_MAX_REASON_CHARS = 300


def make_parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog="tools/compile",
        description="Compile the core and the simulator's loop, for a faster tools/simulate. Optional; it takes some "
        "minutes, and is needed once for each change of these sources.",
        epilog="CC names the C compiler (default: cc); ACTORSERVE_CACHE names the folder of builds. The exit status is "
        f"{EXIT_NO_COMPILER} if this machine cannot compile.",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    make_parser().parse_args(arguments)
    try:
        return run()
    except KeyboardInterrupt:
        print("compile: interrupted; nothing is built", file=sys.stderr)
        return EXIT_INTERRUPTED


def run() -> int:
    """Returns an exit status."""
    folder = build_folder()
    if folder is None:
        print("compile: needs mypy, which tools/test installs", file=sys.stderr)
        return 1
    try:
        trusted_folder(folder.parent)
        with open_lock(folder.parent / "build.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.is_dir():
                print(f"compile: these sources are built already, in {folder}")
                return 0
            _remove_unused(folder.parent)
            if lacking := _lacking():
                print(f"compile: {lacking[:_MAX_REASON_CHARS]}", file=sys.stderr)
                return EXIT_NO_COMPILER
            print("compile: this takes some minutes", flush=True)
            began_s = time.monotonic()
            problem = _build(folder)
    except OSError as error:
        problem = f"cannot build into {folder}: {error.strerror or error}"
    if problem:
        print(f"compile: {problem[:_MAX_REASON_CHARS]}", file=sys.stderr)
        return 1
    print(f"compile: built in {time.monotonic() - began_s:.0f} s, into {folder}")
    return 0


def _lacking() -> str:
    """What this machine needs before it can compile, or nothing."""
    compiler = (shlex.split(os.environ.get("CC", "")) or ["cc"])[0]  # CC may have arguments, as "ccache gcc"
    if shutil.which(compiler) is None:
        return f"there is no C compiler {compiler}: install gcc, or name another one in CC"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        return f"there is no {header}: install python3-dev"
    return ""


def _build(folder: Path) -> str:
    """Build from a copy, because the sources may change meanwhile, and move the result into place whole.

    Returns what failed, or nothing.
    """
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="build-") as name:
        copy, built = Path(name) / "sources", Path(name) / "built"
        for package in ("actorserve", "tools"):
            shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        if build_folder(copy) != folder:
            return "the sources have changed meanwhile; start again"
        command = [sys.executable, "-m", "tools.compiling.build", str(built)]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not built.is_dir():
            lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            return next(
                (line for line in lines if "error" in line), lines[-1] if lines else "the compiler said nothing"
            )
        os.replace(built, folder)
    return ""


def _remove_unused(folder: Path) -> None:
    """Remove leftovers of killed builds, and builds of other sources that are older than a month."""
    oldest = time.time() - _UNUSED_DAYS * 24 * 3600
    for old in folder.iterdir():
        if old.is_dir() and (old.name.startswith("build-") or old.stat().st_mtime < oldest):
            shutil.rmtree(old, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
