"""Schemathesis sends requests that it makes from our OpenAPI document to a running server."""

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.server import running

CONFIG = """
[cluster]
[http]
api_keys_file = "{keys}"
[workers]
count = 1
device = "cpu"
engine = "fake"

"""
KEY = "sk-schemathesis"
KEY_SHA256 = hashlib.sha256(KEY.encode()).hexdigest()
SCHEMATHESIS = shutil.which("st")
ARGUMENTS = (
    *("--phases", "examples,fuzzing", "--max-examples", "5", "--workers", "2", "--request-timeout", "60"),
    *("--generation-database", "none", "--seed", "1", "--checks", "not_a_server_error"),
)


@pytest.mark.skipif(SCHEMATHESIS is None, reason="needs the program st of Schemathesis 4, in an environment of its own")
def test_no_request_makes_a_server_error(tmp_path: Path, default_model_path: Path) -> None:
    """No request that fits the document, and none that almost does, gets a 500."""
    assert SCHEMATHESIS is not None
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[key]]\nname = "a"\nsha256 = "{KEY_SHA256}"\n', encoding="utf-8")
    keys.chmod(0o600)
    with running(tmp_path, CONFIG.format(keys=keys), "--model", str(default_model_path)) as server:
        command = [SCHEMATHESIS, "run", f"{server.url}/openapi.json", "-H", f"Authorization: Bearer {KEY}", *ARGUMENTS]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:]
