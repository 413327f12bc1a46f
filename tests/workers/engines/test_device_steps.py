"""The GPU's forward pass equals the CPU's. Triton interprets, in a process of its own, and graphs are stand-ins."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actorserve.core.messages import NOT_YET, StepPlan
from actorserve.model_files.describe import describe
from tests.workers.gpu_stand_in import NUM_BLOCKS, OnGpu, Replays
from tests.workers.small_models import VOCAB_SIZE, save_model
from tests.workers.triton import interpreted, needs_interpreter, run_interpreted
from workers.batch import IntArray
from workers.engine_options import EngineOptions
from workers.engines.device_steps import graph_sizes
from workers.engines.torch_engine import TorchEngine
from workers.kv.layer_progress import LayerProgress

ARCHITECTURES = ("llama", "qwen3", "gemma3", "mixtral", "qwen3 experts", "opt", "phi4")
TWO_LAYERS: dict[str, dict[str, Any]] = {
    "gemma3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
}
"""The smallest model of these architectures that has every kind of layer; others have two layers anyway."""
NUM_DECODED = (3, 1, 4)
"""Requests of the decode steps: one graph that pads them, and two that fit."""

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # a sigmoid's, in numpy; it gives 0


@needs_interpreter
def test_steps_in_the_interpreter() -> None:
    """All interpreted tests of this file pass in a process whose Triton interprets."""
    run_interpreted(__file__)


@pytest.mark.parametrize("max_requests", [1, 3, 8, 16, 17, 64, 250])
def test_every_decode_step_has_a_graph(max_requests: int) -> None:
    """Graphs go up to the largest step, in ascending order, and pad a step by at most half, or 15 requests."""
    sizes = graph_sizes(max_requests)
    assert sizes == tuple(sorted(set(sizes)))
    assert sizes[-1] == max_requests
    for count in range(1, max_requests + 1):
        size = next(size for size in sizes if size >= count)
        assert size - count < max(count, 1) or size - count <= 15


class Refuses:
    """Recorder that records nothing."""

    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")


def plans(seed: int, num_groups: int = 1) -> list[StepPlan]:
    """Chunks of four prompts, then decode in changing batches. Each row of a table has a block of each layer group."""
    source = random.Random(seed)
    blocks = list(range(NUM_BLOCKS))
    source.shuffle(blocks)
    tables = {name: tuple(blocks.pop() for _ in range(4 * num_groups)) for name in "abcd"}
    num_computed = dict.fromkeys(tables, 0)
    found: list[StepPlan] = []

    def add(chunks: dict[str, int], samples: bool) -> None:
        starts = tuple(num_computed[name] for name in chunks)
        tokens = tuple(tuple(source.randrange(VOCAB_SIZE) for _ in range(count)) for count in chunks.values())
        owned = tuple(tables[name] for name in chunks)
        found.append(StepPlan(len(found), tuple(chunks), starts, tokens, owned, (samples,) * len(chunks)))
        for name, count in chunks.items():
            num_computed[name] += count

    add({"a": 19, "b": 7}, samples=False)
    add({"c": 24, "a": 1, "d": 3}, samples=True)
    for count in NUM_DECODED:
        add(dict.fromkeys(source.sample(list(tables), count), 1), samples=True)
    return found


@interpreted
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_interpreted_steps_are_the_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    """Prompts, which launch each kernel, and decode, which has graphs, give the logits of the engine on a CPU."""
    save_model(tmp_path, architecture, **TWO_LAYERS.get(architecture, {}))
    engine = TorchEngine(describe(tmp_path), EngineOptions(dtype="float32", kv_cache_bytes=16 * 2**20))
    with torch.inference_mode():
        recorder = Replays()
        gpu = OnGpu(tmp_path, monkeypatch, recorder, sizes=(1, 4))
        for plan in plans(seed=1, num_groups=engine.layer_groups.num_groups):
            torch.testing.assert_close(gpu.logits(plan), engine.logits(plan), rtol=1e-3, atol=1e-3)
        assert recorder.num_launched == len(NUM_DECODED)


@interpreted
def test_interpreted_steps_run_ahead_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode that feeds the device's own tokens gives the logits of decode that feeds the same tokens by the host."""
    save_model(tmp_path, "llama")
    tokens: list[int] = [5, 6, 7]
    with torch.inference_mode():
        told, ahead = (OnGpu(tmp_path, monkeypatch, Replays(), sizes=(1,)) for _ in range(2))
        for step_id in range(5):
            start, table = len(tokens) - (1 if step_id else 3), ((3, 1),)
            fed = tuple(tokens[start:])
            logits = told.logits(StepPlan(step_id, ("a",), (start,), (fed,), table, (True,)))
            unknown = (NOT_YET,) if step_id else fed
            assert torch.equal(ahead.logits(StepPlan(step_id, ("a",), (start,), (unknown,), table, (True,))), logits)
            tokens.append(int(logits.argmax()))


@interpreted
def test_interpreted_steps_run_without_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If recording fails, one line says why, and steps launch each kernel, with the logits of the engine on a CPU."""
    save_model(tmp_path, "llama")
    engine = TorchEngine(describe(tmp_path), EngineOptions(dtype="float32", kv_cache_bytes=16 * 2**20))
    with torch.inference_mode():
        refused = OnGpu(tmp_path, monkeypatch, Refuses())
        assert "without CUDA graphs" in caplog.text
        assert "and more" not in caplog.text
        for plan in plans(seed=2):
            torch.testing.assert_close(refused.logits(plan), engine.logits(plan), rtol=1e-3, atol=1e-3)


class Reports(LayerProgress):
    """Keeps what is reported."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.seen: list[tuple[int, int]] = []

    def report(self, step_id: int, num_layers: int) -> None:
        self.seen.append((step_id, num_layers))


@interpreted
def test_interpreted_steps_report_their_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that launches each kernel reports each layer, and one that launches a graph its end alone."""
    save_model(tmp_path, "llama")
    num_layers = describe(tmp_path).config.num_layers
    reports = Reports(num_layers)
    with torch.inference_mode():
        gpu = OnGpu(tmp_path, monkeypatch, Replays(), progress=reports)
        assert reports.seen == [], "recording is no step"
        made = plans(seed=3)
        for plan in made:
            gpu.logits(plan)
    of_layers = [(step_id, number + 1) for step_id in (0, 1) for number in range(num_layers)]
    assert reports.seen == [*of_layers, *((plan.step_id, num_layers) for plan in made[2:])]


@interpreted
def test_interpreted_steps_that_a_graph_is_too_small_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose contexts, padding included, need more room than a graph's launches each kernel."""
    save_model(tmp_path, "llama")
    seen: list[list[int]] = []
    recorder = Replays()

    def has_room(context_lens: IntArray) -> bool:
        seen.append(context_lens.tolist())
        return bool(context_lens.sum() < 40)

    with torch.inference_mode():
        gpu = OnGpu(tmp_path, monkeypatch, recorder, has_room)
        assert recorder.sizes == [6, 4, 2, 1]
        for start in (20, 50):
            plan = StepPlan(
                0, ("a", "b", "c"), (start, 3, 4), ((1,), (2,), (3,)), ((0, 1, 2, 3), (4,), (5,)), (True,) * 3
            )
            assert gpu.logits(plan).shape == (3, VOCAB_SIZE)
    assert seen == [[21, 4, 5, 1], [51, 4, 5, 1]]
    assert recorder.num_launched == 1
