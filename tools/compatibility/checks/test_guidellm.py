"""guidellm: its benchmark, with prompts that it makes itself."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

NUM_REQUESTS = 6


def test_benchmark(tmp_path: Path, url: str, key: str, model: str) -> None:
    """Every request of a run with concurrent streams succeeds, and the report has times of tokens."""
    report = tmp_path / "report.json"
    command = [
        *(str(Path(sys.executable).parent / "guidellm"), "benchmark", "run"),
        *("--target", url, "--model", model, "--processor", os.environ["ACTORSERVE_TOKENIZER"]),
        *("--backend-kwargs", json.dumps({"api_key": key})),
        *("--profile", "concurrent", "--rate", "2", "--max-requests", str(NUM_REQUESTS)),
        *("--data", "prompt_tokens=64,output_tokens=16", "--output-dir", str(tmp_path), "--outputs", report.name),
    ]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=True)
    (benchmark,) = json.loads(report.read_text("utf-8"))["benchmarks"]
    totals: dict[str, Any] = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0)
    assert benchmark["metrics"]["time_to_first_token_ms"]["successful"]["mean"] > 0
