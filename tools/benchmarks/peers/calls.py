"""What a pair of actors can be asked, and the loop of the caller's process: a line of JSON in, a line of JSON out.

One actor calls the other, with the fields of a Place, and gets those of a Placed. Everyone calls with the same, and
counts the same way. Standard library only: Ray's Python has nothing of ours.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

INSTANCE = ("worker-0", 1)
"""What the answering actor names; the request's id and epoch go back with it."""


@dataclass(frozen=True, slots=True)
class Processes:
    """Process ids: the two actors', and those of all that run on their account, the two included."""

    pair: tuple[int, ...]
    all: tuple[int, ...]


class Caller(Protocol):
    """The calling actor. Times are in seconds, as it sees them."""

    def one_at_a_time(self, num_calls: int) -> list[float]:
        """Each call's round trip; the next begins when one is answered."""
        ...

    def pipelined(self, num_calls: int, window: int) -> float:
        """All of them together, ``window`` at once: when the last of those is answered, the next are sent."""
        ...

    def processes(self) -> Processes: ...

    def close(self) -> None:
        """End the other actor, and what runs on their account."""
        ...


def request_id(number: int) -> str:
    return f"cmpl-0123456789abcdef-{number}"


def windows(num_calls: int, window: int) -> list[int]:
    """How many are sent at once, each time."""
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


def answer(caller: Caller, asked: dict[str, Any]) -> dict[str, Any]:
    """Do what one line asks."""
    match asked:
        case {"one_at_a_time": int(num_calls)}:
            return {"seconds": caller.one_at_a_time(num_calls)}
        case {"pipelined": int(num_calls), "window": int(window)}:
            return {"seconds": caller.pipelined(num_calls, window)}
        case {"processes": True}:
            processes = caller.processes()
            return {"pair": processes.pair, "all": processes.all}
    return {"error": f"nobody understands {str(asked)[:80]}"}


def serve(make: Callable[[str], Caller], expected: tuple[type[Exception], ...]) -> int:
    """Be the caller's process, until stdin ends. ``make`` is given a folder for its files and sockets (``argv[1]``).

    ``expected`` are what making it may raise: their text is told to the parent in one line.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print as they like

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
