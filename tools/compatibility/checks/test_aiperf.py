"""AIPerf: its profile of each endpoint, with prompts that it makes itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NUM_REQUESTS = 6


@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses"])
def test_profile(tmp_path: Path, url: str, key: str, model: str, endpoint: str) -> None:
    """Every request of a run with concurrent streams succeeds, and the report has times of tokens."""
    command = [
        *(str(Path(sys.executable).parent / "aiperf"), "profile", "--ui", "none"),
        *("--url", url, "--api-key", key, "--model", model, "--tokenizer", os.environ["ACTORSERVE_TOKENIZER"]),
        *("--endpoint-type", endpoint, "--streaming", "--concurrency", "2", "--request-count", str(NUM_REQUESTS)),
        *("--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16", "--artifact-dir", str(tmp_path)),
        *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"),
    ]
    subprocess.run(command, cwd=tmp_path, check=True)
    report = json.loads(next(tmp_path.rglob("*profile_export*aiperf.json")).read_text("utf-8"))
    assert report["request_count"]["avg"] == NUM_REQUESTS
    assert not report["error_summary"]
    assert report["time_to_first_token"]["avg"] > 0
