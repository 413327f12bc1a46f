"""An operator at a console, which runs as a process of its own."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from actorserve.console.coordinators import Coordinators
from actorserve.console.outcome import as_objects
from actorserve.console.session import Session
from actorserve.core.messages import Answer, Outcome
from actorserve.wire.console import ConsoleClient, console_address
from tests.e2e.server import ROOT

DEADLINE_S = 120.0


class Console:
    """``actorserve console`` as a process, with the runtime folder of a server, or of the coordinator that serves among
    several.
    """

    def __init__(self, *runtime_dirs: Path) -> None:
        self._runtime_dirs = {console_address(folder): folder for folder in runtime_dirs}

    def __call__(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        """The JSON that the console prints; empty if it prints none. Raises: AssertionError for another exit code."""
        command = [sys.executable, "-P", "-m", "actorserve", "console", "--runtime-dir", str(self._serving())]
        done = subprocess.run(
            [*command, *arguments, "--json"],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == code, (done.stdout, done.stderr)
        found: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
        return found

    def act(self, *arguments: str) -> Answer:
        """The answer, without starting a process. Raises: AssertionError if it is not done."""
        with self._coordinators() as coordinators:
            session = Session(coordinators, DEADLINE_S)
            answer = session.ask(session.command(arguments[0], arguments[1:]))
        assert answer is not None
        assert answer.outcome is Outcome.DONE, answer.text
        return answer

    def rows(self, verb: str, *arguments: str) -> list[dict[str, Any]]:
        """The rows of an answer, without starting a process. Raises: AssertionError if none serves."""
        with self._coordinators() as coordinators:
            answer = Session(coordinators, 1.0).read(verb, *arguments)
        assert answer is not None
        assert answer.outcome is not Outcome.STANDBY, answer.text
        return as_objects(answer)

    @contextmanager
    def _coordinators(self) -> Iterator[Coordinators]:
        with ExitStack() as stack:
            yield Coordinators([stack.enter_context(closing(ConsoleClient(one))) for one in self._runtime_dirs])

    def _serving(self) -> Path:
        """The runtime folder of the coordinator that serves. Raises: AssertionError if none does for long."""
        if len(self._runtime_dirs) > 1:
            with self._coordinators() as coordinators:
                answer = Session(coordinators, DEADLINE_S).read("status")
                assert answer is not None
                assert answer.outcome is Outcome.DONE, answer.text
                return self._runtime_dirs[coordinators.address]
        [folder] = self._runtime_dirs.values()
        return folder

    def states(self) -> dict[str, str]:
        return {row["worker"]: row["state"] for row in self.rows("workers")}

    def num_requests(self, worker: str) -> int:
        rows = {row["worker"]: row for row in self.rows("workers")}
        return int(rows[worker]["running"]) + int(rows[worker]["waiting"])

    async def ask(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        return await asyncio.to_thread(self, *arguments, code=code)
