"""Schemathesis: requests that it makes from our OpenAPI document, valid and almost valid."""

import os
import subprocess
import sys
from pathlib import Path

ANSWER_S = 5
"""The server gives up an answer after so long, because Schemathesis' random chats may have very long ones."""
ARGUMENTS = (
    *("-H", f"x-request-timeout: {ANSWER_S}"),
    *("--phases", "examples,fuzzing", "--max-examples", "20", "--request-timeout", "60"),
    # One worker, because Python 3.11 miscounts its recursion if two threads parse Python, as Hypothesis does.
    *("--workers", "1"),
    *("--generation-database", "none", "--seed", "1", "--checks", "not_a_server_error"),
)


def test_no_request_makes_a_server_error(tmp_path: Path, url: str, key: str) -> None:
    """No request that fits the document, and none that almost does, gets a 500."""
    program = str(Path(sys.executable).parent / "st")
    command = [program, "run", f"{url}/openapi.json", "-H", f"Authorization: Bearer {key}", *ARGUMENTS]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "NO_COLOR": "1"}, check=True)
