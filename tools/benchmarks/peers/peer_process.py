"""Peers as a measurement sees them: child processes that take commands over pipes, one at a time."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tools.benchmarks.common.answers import ask, read_answer
from tools.benchmarks.common.paths import ROOT
from tools.benchmarks.peers.protocol import BlockBudget, Shape


@dataclass(frozen=True, slots=True)
class Entry:
    """A participant. Entries of one ``name`` are settings of one engine, whose figure is that of its better setting."""

    name: str
    setting: str
    module: str
    options: Mapping[str, Any]
    python: Path = field(default_factory=lambda: Path(sys.executable))
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.name}, {self.setting}" if self.setting else self.name


class PeerProcess:
    """One peer's process, which ends with its ``with`` block."""

    def __init__(self, entry: Entry, budget: BlockBudget) -> None:
        """Start the process; ``wait_ready`` returns when it takes commands."""
        self.entry = entry
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed with the process
        told = json.dumps({"options": dict(entry.options), "budget": asdict(budget)})
        self._process = subprocess.Popen(
            [str(entry.python), "-P", "-m", entry.module, told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": str(budget.num_threads),
                "HF_HUB_OFFLINE": "1",
                **entry.environment,
            },
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def wait_ready(self) -> None:
        """Raises: BenchError, with the peer's reason."""
        self._read()

    def measure(self, shape: Shape) -> float:
        """Seconds of one measurement. Raises: BenchError."""
        return float(self._ask({"phase": shape.phase, "size": shape.size, "steps": shape.steps})["seconds"])

    def score(self, token_ids: Sequence[int]) -> float:
        """Minus the log-probability (natural) of all tokens except the first. Raises: BenchError."""
        return float(self._ask({"score": list(token_ids)})["nats"])

    def peak_memory_bytes(self) -> int:
        """Raises: BenchError."""
        return int(self._ask({"peak": True})["bytes"])

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        return ask(self._process, self._errors, self.entry.label, command)

    def _read(self) -> dict[str, Any]:
        return read_answer(self._process, self._errors, self.entry.label)
