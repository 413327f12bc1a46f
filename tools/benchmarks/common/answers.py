"""How a bench talks to a process of its own: a question and an answer are each a line of JSON."""

import contextlib
import json
import subprocess
from typing import IO, Any

from tools.benchmarks.common.errors import BenchError


def ask(process: subprocess.Popen[str], errors: IO[str], name: str, question: dict[str, Any]) -> dict[str, Any]:
    """The answer. Raises: BenchError, which names the process, as ``read_answer`` does."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # what became of it is told below
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
    return read_answer(process, errors, name)


def read_answer(process: subprocess.Popen[str], errors: IO[str], name: str) -> dict[str, Any]:
    """The next thing that it says. Raises: BenchError where it has ended, with the last of its ``errors``, or says why
    it cannot.
    """
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        status = process.wait()
        errors.seek(0)
        reason = (errors.read().strip().splitlines() or ["it said nothing"])[-1]
        raise BenchError(f"{name}: its process ended with status {status}: {reason[:300]}")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise BenchError(f"{name}: {answer['error']}")
    return answer
