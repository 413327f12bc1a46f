"""Runs ``tools/bench`` in a process of its own, as a person does."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 900.0
"""Long enough for a machine that others compute on as well."""


def bench_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tools.benchmarks", *arguments]


def run_bench(*arguments: str, folder: str | None = None) -> subprocess.CompletedProcess[str]:
    """``folder`` is for the command's temporary files."""
    return subprocess.run(
        bench_command(*arguments),
        cwd=ROOT,
        env=None if folder is None else {**os.environ, "TMPDIR": folder},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
