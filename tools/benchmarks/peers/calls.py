"""The commands that a pair of actors takes, and the loop of the calling process: lines of JSON in and out.

One actor calls the other with the fields of a Place message, and the answer has the fields of a Placed. All pairs
send the same fields and count in the same way. Standard library only, because Ray's Python has none of our packages.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

INSTANCE = ("worker-0", 1)
"""The instance that the answering actor names, along with the request's id and epoch."""


@dataclass(frozen=True, slots=True)
class Processes:
    """The ids of the two actors' processes, and of all processes that run for them, the two included."""

    pair: tuple[int, ...]
    all: tuple[int, ...]


class Caller(Protocol):
    """The calling actor. Times are in seconds, as the caller sees them."""

    def one_at_a_time(self, num_calls: int) -> list[float]:
        """The round trip of each call; a call begins when the one before it is answered."""
        ...

    def pipelined(self, num_calls: int, window: int) -> float:
        """The time of all calls, ``window`` at once: a window is sent when all calls of the last one are answered."""
        ...

    def processes(self) -> Processes: ...

    def close(self) -> None:
        """End the other actor, and all processes that run for the two."""
        ...


def request_id(number: int) -> str:
    return f"cmpl-0123456789abcdef-{number}"


def windows(num_calls: int, window: int) -> list[int]:
    """The number of calls in each window."""
    full, rest = divmod(num_calls, window)
    return [window] * full + [rest] * bool(rest)


def time_each(call: Callable[[int], None], num_calls: int) -> list[float]:
    """The seconds that ``call(0)``, ``call(1)``, ... take."""
    times = []
    for number in range(num_calls):
        began = time.perf_counter()
        call(number)
        times.append(time.perf_counter() - began)
    return times


def answer(caller: Caller, command: dict[str, Any]) -> dict[str, Any]:
    """Carry out one command."""
    match command:
        case {"one_at_a_time": int(num_calls)}:
            return {"seconds": caller.one_at_a_time(num_calls)}
        case {"pipelined": int(num_calls), "window": int(window)}:
            return {"seconds": caller.pipelined(num_calls, window)}
        case {"processes": True}:
            processes = caller.processes()
            return {"pair": processes.pair, "all": processes.all}
    return {"error": f"unknown command: {str(command)[:80]}"}


def serve(make: Callable[[str], Caller], expected: tuple[type[Exception], ...]) -> int:
    """Run the caller's process until stdin ends. ``make`` gets a folder for its files and sockets (``argv[1]``).

    ``expected`` are the errors that ``make`` may raise; the parent gets their text in one line.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # because libraries may print

    def tell(line: dict[str, Any]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    try:
        caller = make(sys.argv[1])
    except expected as error:
        tell({"error": " ".join(str(error).split())[:300] or type(error).__name__})
        return 1
    try:
        tell({"ready": True})
        for line in sys.stdin:
            tell(answer(caller, json.loads(line)))
    finally:
        caller.close()
    return 0
