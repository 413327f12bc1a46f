"""The commands that a peer takes, and the loop of its process: lines of JSON in and out.

Standard library only, because llama.cpp's Python has neither torch nor our packages.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

CHUNK_TOKENS = 512
"""The chunk size of every peer that computes prompts in chunks."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One measurement: a prompt of ``size`` tokens, or several decode steps of ``size`` requests."""

    phase: Literal["prefill", "decode"]
    size: int

    @property
    def steps(self) -> int:
        return 1 if self.phase == "prefill" else max(4, 32 // self.size)

    @property
    def num_tokens(self) -> int:
        """Tokens of one measurement, over all its steps."""
        return self.size * self.steps

    @property
    def name(self) -> str:
        return f"{self.phase} {self.size}"


@dataclass(frozen=True, slots=True)
class BlockBudget:
    """The requests that a peer needs memory for. A decoding request has ``context_tokens`` before its first step."""

    num_threads: int
    context_tokens: int
    max_batch: int
    max_prompt_tokens: int
    max_steps: int


class Peer(Protocol):
    """An engine under measurement. Times are in seconds, and exclude preparation."""

    def prefill(self, num_tokens: int) -> float:
        """Compute one prompt, and the logits of its last token."""
        ...

    def decode(self, batch: int, steps: int) -> float:
        """Compute ``steps`` steps of ``batch`` requests, each with ``context_tokens`` before the first step."""
        ...


@runtime_checkable
class Scorer(Peer, Protocol):
    """A peer that can compute the likelihood of a text."""

    def score(self, token_ids: Sequence[int]) -> float:
        """Minus the log-probability (natural) of all tokens except the first, each given the tokens before it."""
        ...


def peak_memory_bytes(status: Path = Path("/proc/self/status")) -> int:
    """The most memory that this process has held at once, mapped files included (VmHWM); 0 if /proc is missing."""
    try:
        lines = status.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def answer(peer: Peer, command: dict[str, Any]) -> dict[str, Any]:
    """Carry out one command."""
    match command:
        case {"phase": "prefill", "size": int(num_tokens)}:
            return {"seconds": peer.prefill(num_tokens)}
        case {"phase": "decode", "size": int(batch), "steps": int(steps)}:
            return {"seconds": peer.decode(batch, steps)}
        case {"score": [*token_ids]}:
            if not isinstance(peer, Scorer):
                return {"error": "it cannot say how likely a text is"}
            return {"nats": peer.score(token_ids)}
        case {"peak": True}:
            return {"bytes": peak_memory_bytes()}
    return {"error": f"unknown command: {str(command)[:80]}"}


def serve(make: Callable[[dict[str, Any], BlockBudget], Peer], expected: tuple[type[Exception], ...]) -> int:
    """Run a peer's process; ``argv[1]`` holds its options and its budget as JSON.

    ``expected`` are the errors that ``make`` may raise; the parent gets their text in one line.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # because libraries may print

    def tell(line: dict[str, Any]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    options = json.loads(sys.argv[1])
    try:
        peer = make(options["options"], BlockBudget(**options["budget"]))
    except expected as error:
        tell({"error": " ".join(str(error).split())[:300]})
        return 1
    tell({"ready": True})
    for line in sys.stdin:
        tell(answer(peer, json.loads(line)))
    return 0
