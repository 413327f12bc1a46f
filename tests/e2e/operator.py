"""An operator at a console, which runs as a process of its own."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from actorserve.console.outcome import as_objects
from actorserve.console.session import Session
from actorserve.core.messages import Answer, Outcome
from actorserve.wire.console import ConsoleClient, console_address
from tests.e2e.server import ROOT

DEADLINE_S = 60.0


class Console:
    """``actorserve console`` as a process, with a server's runtime folder."""

    def __init__(self, runtime_dir: Path) -> None:
        self.runtime_dir = runtime_dir

    def __call__(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        """The JSON that the console prints; empty if it prints none. Raises: AssertionError for another exit code."""
        command = [sys.executable, "-P", "-m", "actorserve", "console", "--runtime-dir", str(self.runtime_dir)]
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
        client = ConsoleClient(console_address(self.runtime_dir))
        try:
            session = Session(client, DEADLINE_S)
            answer = session.ask(session.command(arguments[0], arguments[1:]))
        finally:
            client.close()
        assert answer is not None
        assert answer.outcome is Outcome.DONE, answer.text
        return answer

    def rows(self, verb: str, *arguments: str) -> list[dict[str, Any]]:
        """The rows of an answer, without starting a process. Raises: AssertionError if none comes."""
        client = ConsoleClient(console_address(self.runtime_dir))
        try:
            answer = Session(client, 1.0).read(verb, *arguments)
        finally:
            client.close()
        assert answer is not None
        return as_objects(answer)

    def states(self) -> dict[str, str]:
        return {row["worker"]: row["state"] for row in self.rows("workers")}

    def num_requests(self, worker: str) -> int:
        rows = {row["worker"]: row for row in self.rows("workers")}
        return int(rows[worker]["running"]) + int(rows[worker]["waiting"])

    async def ask(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        return await asyncio.to_thread(self, *arguments, code=code)
