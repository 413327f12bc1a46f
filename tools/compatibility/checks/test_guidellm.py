"""guidellm: its benchmark, with prompts that it makes itself."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NUM_REQUESTS = 6


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions"])
def test_benchmark(tmp_path: Path, url: str, key: str, model: str, endpoint: str) -> None:
    """Every request of a run with concurrent streams succeeds, and the report has times of tokens."""
    report = tmp_path / "report.json"
    backend = {"kind": "openai_http", "target": url, "model": model, "api_key": key, "request_format": endpoint}
    options = {
        "backend": backend,
        "tokenizer": {"kind": "hf_auto", "model": os.environ["ACTORSERVE_TOKENIZER"]},
        "data": {"kind": "synthetic_text", "prompt_tokens": 64, "output_tokens": 16},
        "profile": {"kind": "concurrent", "streams": 2},
        "constraint": {"kind": "max_requests", "count": NUM_REQUESTS},
        "output": {"kind": "json", "path": str(report)},
    }
    command = [str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console-interactive"]
    for name, value in options.items():
        command += [f"--{name}", json.dumps(value)]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=True)
    (benchmark,) = json.loads(report.read_text("utf-8"))["benchmarks"]
    totals: dict[str, Any] = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0)
    assert benchmark["metrics"]["time_to_first_token_ms"]["successful"]["mean"] > 0
