"""lm-eval: a task scored by prompts' log-probabilities, through the server and by transformers on the same weights."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TASK = Path(__file__).parent / "lm_eval_task"


def scores(folder: Path, kind: str, **arguments: object) -> dict[str, Any]:
    """The task's scores as lm-eval's command line reports them."""
    lm_eval = Path(sys.executable).parent / "lm_eval"
    given = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = [str(lm_eval), "run", "--model", kind, "--model_args", given, "--tasks", "capitals"]
    command += ["--include_path", str(TASK), "--output_path", str(folder), "--device", "cpu", "--batch_size", "1"]
    environment = {**os.environ, "OPENAI_API_KEY": os.environ["ACTORSERVE_KEY"], "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, cwd=TASK, env=environment, check=True)
    found: dict[str, Any] = json.loads(next(folder.rglob("results_*.json")).read_text("utf-8"))["results"]["capitals"]
    return found


@pytest.fixture(scope="module")
def tokenizer() -> str:
    """A folder with the model's tokenizer, because lm-eval sends token ids."""
    return os.environ["ACTORSERVE_TOKENIZER"]


def test_scores_are_those_of_transformers(tmp_path: Path, url: str, model: str, tokenizer: str) -> None:
    """In float32 the server gives the scores that transformers gives."""
    ours = scores(
        tmp_path / "ours",
        "local-completions",
        model=model,
        base_url=f"{url}/v1/completions",
        tokenizer_backend="huggingface",
        tokenizer=tokenizer,
        num_concurrent=4,
    )
    weights = Path(os.environ["ACTORSERVE_WEIGHTS"])
    theirs = scores(
        tmp_path / "theirs",
        "hf",
        pretrained=weights.parent,
        gguf_file=weights.name,
        tokenizer=tokenizer,
        dtype="float32",
    )
    for metric in ("acc,none", "acc_norm,none"):
        print(f"{metric}: {ours[metric]:.4f} through the server, {theirs[metric]:.4f} with transformers")
        assert ours[metric] == pytest.approx(theirs[metric], abs=1e-9)
