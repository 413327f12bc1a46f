"""The other process of a measurement between two: it prints a line when it is ready, and ends with the measurement."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tools.benchmarks.common.errors import BenchError
from tools.figures.files import ROOT


@contextmanager
def peer_process(module: str, *arguments: object) -> Iterator["subprocess.Popen[str]"]:
    """Runs ``tools.benchmarks.cluster.MODULE``, with pipes for its input and output."""
    command = [sys.executable, "-m", f"tools.benchmarks.cluster.{module}", *map(str, arguments)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


def read_line(process: "subprocess.Popen[str]") -> str:
    """The next line that it prints. Raises: BenchError if it has ended."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise BenchError("a process of the measurement ended before it was ready")
    return line
