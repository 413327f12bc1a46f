"""``tools/gpu-first-hour``: everything that a person with a GPU is asked to run, in one command.

It checks what the machine lacks, runs the tests that need a GPU, serves the default model on the GPU and asks it a
question, and then measures. A step that fails does not keep the later steps from running.
"""

import argparse
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
import torch

from actorserve.errors import ActorserveError
from tools.benchmarks.common.arguments import names
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.paths import ROOT
from tools.benchmarks.gpu.checks import missing
from tools.benchmarks.gpu.shapes import SHAPES
from tools.benchmarks.serving.servers import RunningServer, ServerSpec
from tools.figures.machine import machine_line, this_machine

EXIT_FAILED = 1
EXIT_NO_GPU = 2
_PYTHON = (sys.executable, "-P", "-m")
_QUESTION = "What is the capital of France? Answer in one sentence."
_ANSWER_TIMEOUT_S = 60.0


class Step(NamedTuple):
    """``run`` raises BenchError if the step fails."""

    title: str
    run: Callable[[], None]


def commands(shapes: Sequence[str], folder: Path, vllm_python: Path | None = None) -> dict[str, tuple[str, ...]]:
    """The measurements, by title. Each writes its figures into ``folder``."""

    def command(*words: str, figures: str) -> tuple[str, ...]:
        return (*words, "--json", str(folder / f"{figures}.json"))

    beside = () if vllm_python is None else ("--vllm-python", str(vllm_python))
    found = {f"measure {shape}": command("gpu", "--shape", shape, figures=f"gpu-{shape}") for shape in shapes}
    for shape in shapes:
        title = f"compare {shape} with other engines"
        found[title] = command("batching", "--shape", shape, *beside, figures=f"gpu-batching-{shape}")
    tiles = ("tiles", "--device", "cuda", "--dtype", "bfloat16")
    return found | {"measure row tiles on the default model": command(*tiles, figures="gpu-tiles")}


def steps(shapes: Sequence[str], folder: Path, vllm_python: Path | None = None) -> list[Step]:
    """All steps, in order."""
    tests = (*_PYTHON, "pytest", "-m", "gpu", "-rs", str(ROOT / "tests"))
    measurements = [
        Step(title, _running((*_PYTHON, "tools.benchmarks", *command)))
        for title, command in commands(shapes, folder, vllm_python).items()
    ]
    return [Step("tests that need a GPU", _running(tests)), Step("serve and chat", lambda: chat("cuda")), *measurements]


def take(steps: Sequence[Step]) -> list[str]:
    """Take all steps. Returns one line for each that failed."""
    failed = []
    for step in steps:
        _say(step.title)
        try:
            step.run()
        except BenchError as error:
            failed.append(f"{step.title}: {error}")
            _say(f"failed: {error}")
    return failed


def chat(device: str, model: str = "default") -> None:
    """Serve the model with one worker on ``device``, ask it a question, and print its answer. Raises: BenchError."""
    spec = ServerSpec(
        f"actorserve on {device}",
        (
            *(*_PYTHON, "actorserve", "serve", "--model", model, "--device", device),
            *("--workers", "1", "--port", "{port}"),
        ),
    )
    with RunningServer(spec) as server:
        seconds = server.first_token_s()
        body = {"messages": [{"role": "user", "content": _QUESTION}], "temperature": 0.0, "max_tokens": 40}
        try:
            with httpx.Client(base_url=server.url, timeout=_ANSWER_TIMEOUT_S, trust_env=False) as client:
                name = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
                answer = client.post("/v1/chat/completions", json={"model": name, **body}).raise_for_status().json()
        except httpx.HTTPError as error:
            raise BenchError(f"{spec.name} does not answer: {error}") from None
    _say(f"{name} gave a first token after {seconds:.1f} s, and answers: {answer['choices'][0]['message']['content']}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if all steps succeed, 1 if one fails, and 2 without a usable GPU."""
    parser = argparse.ArgumentParser(prog="tools/gpu-first-hour", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument(
        "--shapes",
        type=names,
        default=("llama-3-8b", "qwen3-30b-a3b"),
        metavar="NAME,NAME",
        help=f"models to measure, with random weights: {', '.join(SHAPES)}",
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "tools" / "benchmarks" / "figures", help="folder of the figure files"
    )
    parser.add_argument("--vllm-python", type=Path, metavar="FILE", help="the Python of an environment that has vLLM")
    parsed = parser.parse_args(arguments)
    if unknown := set(parsed.shapes) - set(SHAPES):
        parser.error(f"unknown shapes: {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the steps' processes end with this one
    problem = missing()
    if problem is not None:
        _say(problem)
        return EXIT_NO_GPU
    _say(machine_line(this_machine(gpu=f"{torch.cuda.get_device_name()}, torch {torch.__version__}")))
    try:
        parsed.output.mkdir(parents=True, exist_ok=True)
        failed = take(steps(parsed.shapes, parsed.output, parsed.vllm_python))
    except (ActorserveError, OSError) as error:
        _say(str(error))
        return EXIT_FAILED
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    _say(f"the figures are in {parsed.output}")
    for line in failed:
        _say(f"failed: {line}")
    return EXIT_FAILED if failed else 0


def _running(command: Sequence[str]) -> Callable[[], None]:
    """Runs a command in the repository, with its output shown."""

    def run() -> None:
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if status:
            raise BenchError(f"it ended with status {status}")

    return run


def _say(text: str) -> None:
    print(f"gpu-first-hour: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
