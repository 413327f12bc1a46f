"""How a measurement talks to a process that it started: commands and answers are lines of JSON."""

import contextlib
import json
import subprocess
from typing import IO, Any

from tools.benchmarks.common.errors import BenchError


def ask(process: subprocess.Popen[str], errors: IO[str], name: str, command: dict[str, Any]) -> dict[str, Any]:
    """Send a command, and return the answer. Raises: BenchError, as ``read_answer`` does."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # read_answer reports how the process ended
        process.stdin.write(json.dumps(command) + "\n")
        process.stdin.flush()
    return read_answer(process, errors, name)


def read_answer(process: subprocess.Popen[str], errors: IO[str], name: str) -> dict[str, Any]:
    """The process's next answer.

    Raises: BenchError with the process's name, if the answer is an error, or with the last line of ``errors``, if the
    process has ended.
    """
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        status = process.wait()
        errors.seek(0)
        reason = (errors.read().strip().splitlines() or ["it printed nothing"])[-1]
        raise BenchError(f"{name}: its process ended with status {status}: {reason[:300]}")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise BenchError(f"{name}: {answer['error']}")
    return answer
