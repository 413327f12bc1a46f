"""Steps that are begun ahead give the tokens of steps that are begun one by one. Triton interprets."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from actorserve.core.messages import NOT_YET, RequestSpec, SamplingParams, StepDone, StepPlan
from actorserve.model_files.describe import describe
from actorserve.model_files.grammars import GrammarCompiler, Vocabulary
from tests.workers.gpu_stand_in import CPU, LIMITS, OnGpu, Replays
from tests.workers.small_models import VOCAB_SIZE, save_model
from tests.workers.triton import interpreted, needs_interpreter, run_interpreted
from workers.engine_options import EngineOptions
from workers.engines.device_steps import graph_sizes
from workers.engines.steps_ahead import DeviceStep, StepsAhead
from workers.engines.torch_engine import TorchEngine
from workers.sampling.grammars import Grammars, Masks
from workers.sampling.prompt_scorer import PromptScorer
from workers.sampling.sampler import Sampler
from workers.sampling.token_choice import Rule, choose

END = VOCAB_SIZE - 1
PROMPTS = {"a": (5, 6, 7), "b": (8,), "c": (9, 10), "d": (11, 12), "e": (13,)}
GRAMMAR = json.dumps({"grammars": [{"lark_grammar": "start: /(ab|cab)*d/"}]})
SAMPLING = {
    "a": SamplingParams(seed=1, max_tokens=20, temperature=0.0),
    "b": SamplingParams(seed=2, max_tokens=20, temperature=1.0, top_p=0.9, top_k=40),
    "c": SamplingParams(seed=3, max_tokens=20, temperature=1.0, repetition_penalty=1.5, frequency_penalty=1.0),
    "d": SamplingParams(seed=4, max_tokens=20, temperature=1.0, grammar=GRAMMAR),
    "e": SamplingParams(seed=5, max_tokens=20, temperature=0.0, top_logprobs=2),
}

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # a sigmoid's, in numpy; it gives 0


@needs_interpreter
def test_steps_in_the_interpreter() -> None:
    """All interpreted tests of this file pass in a process whose Triton interprets."""
    run_interpreted(__file__)


def choose_by_torch(logits: Tensor, rules: Tensor, masks: Tensor, allowed: Tensor) -> Tensor:
    """The choice of the sampler on a CPU."""
    rows = tuple(row for row, mask in enumerate(masks.tolist()) if mask >= 0)
    fields = (Rule(*rule) for rule in rules.tolist())
    exact = [rule._replace(top_k=int(rule.top_k)) for rule in fields]
    return torch.tensor(choose(logits, exact, Masks(rows, allowed.numpy(), ())))


def compiler() -> GrammarCompiler:
    tokens = [bytes([token_id]) for token_id in range(END)] + [b"<end>"]
    return GrammarCompiler(Vocabulary(tokens, (END,), (END,)))


class Engine:
    """What begins steps ahead, with the requests added."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, names: str) -> None:
        size = next(size for size in graph_sizes(LIMITS.max_requests) if size >= len(names))
        gpu = OnGpu(folder, monkeypatch, Replays(), sizes=(size,))
        sampler, grammars = Sampler(VOCAB_SIZE, CPU), Grammars(compiler, VOCAB_SIZE, (END,))
        for name in names:
            request = RequestSpec(name, PROMPTS[name], SAMPLING[name])
            sampler.add(request)
            grammars.add(request, grammars.prepare(request))
        self.ahead = StepsAhead(
            gpu.steps,
            lambda x: gpu.model.logits(x)[0],
            choose_by_torch,
            sampler,
            grammars,
            PromptScorer(),
            VOCAB_SIZE,
            CPU,
        )

    def begin(self, plan: StepPlan) -> DeviceStep:
        plan = self.ahead.without_failed(plan)
        rows = [row for row, samples in enumerate(plan.samples) if samples]
        names = [plan.request_ids[row] for row in rows]
        ends = [plan.starts[row] + len(plan.token_ids[row]) for row in rows]
        positions = [end - len(PROMPTS[name]) for name, end in zip(names, ends, strict=True)]
        with torch.inference_mode():
            return self.ahead.begin(plan, names, positions)


def plan_of(step_id: int, names: str, newest: dict[str, int]) -> StepPlan:
    """The requests' prompts in step 0, and then one token each: the newest one."""
    starts = tuple(len(PROMPTS[name]) + step_id - 1 if step_id else 0 for name in names)
    fed = tuple((newest[name],) if step_id else PROMPTS[name] for name in names)
    tables = tuple((2 * "abcde".index(name), 2 * "abcde".index(name) + 1) for name in names)
    return StepPlan(step_id, tuple(names), starts, fed, tables, (True,) * len(names))


def one_by_one(engine: Engine | TorchEngine, names: str, num_steps: int) -> list[StepDone]:
    """Steps that are planned with the tokens of the step before."""
    done: list[StepDone] = []
    for step_id in range(num_steps):
        newest = dict(zip(done[-1].request_ids, done[-1].token_ids, strict=True)) if done else {}
        plan = plan_of(step_id, names, newest)
        done.append(engine.begin(plan).result())
    return done


def run_ahead(engine: Engine, names: str, num_steps: int) -> list[StepDone]:
    """Steps of which two are begun before the first one's tokens are read."""
    steps = [engine.begin(plan_of(step_id, names, dict.fromkeys(names, NOT_YET))) for step_id in range(num_steps)]
    return [step.result() for step in steps]


def outcome(done: list[StepDone]) -> list[StepDone]:
    return [replace(step, duration_s=0.0) for step in done]


@interpreted
@pytest.mark.parametrize("names", ["b", "ecb", "abcde"])
def test_interpreted_steps_ahead_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    """Greedy and random choice, penalties, grammars and log-probabilities do not depend on how far the host is."""
    save_model(tmp_path, "llama")
    told = one_by_one(Engine(tmp_path, monkeypatch, names), names, 6)
    assert outcome(run_ahead(Engine(tmp_path, monkeypatch, names), names, 6)) == outcome(told)
    assert all(step.request_ids == tuple(names) for step in told)
    if "d" in names:
        answer = bytes(step.token_ids[names.index("d")] for step in told)
        assert b"cab".startswith(answer[:1]) or answer[:1] in (b"a", b"d")
    if "e" in names:
        assert all(step.logprobs[names.index("e")] is not None for step in told)


@interpreted
def test_interpreted_steps_give_the_cpus_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine on a CPU gives the same tokens."""
    save_model(tmp_path, "llama")
    engine = TorchEngine(describe(tmp_path), EngineOptions(dtype="float32", kv_cache_bytes=16 * 2**20))
    for name in "abc":
        engine.add(RequestSpec(name, PROMPTS[name], SAMPLING[name]))
    wanted = one_by_one(engine, "abc", 6)
    found = run_ahead(Engine(tmp_path, monkeypatch, "abc"), "abc", 6)
    assert [step.token_ids for step in found] == [step.token_ids for step in wanted]


@interpreted
def test_interpreted_failed_grammars_are_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose grammar fails is named by one step, and others go on."""
    save_model(tmp_path, "llama")
    monkeypatch.setitem(SAMPLING, "d", replace(SAMPLING["d"], grammar="no grammar"))
    done = run_ahead(Engine(tmp_path, monkeypatch, "ad"), "ad", 2)
    assert [step.failed for step in done] == [("d",), ()]
    assert [step.request_ids for step in done] == [("a",)] * 2


@interpreted
def test_interpreted_tokens_of_dropped_requests_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may be dropped while its step is in flight, and come again with all of its output."""
    save_model(tmp_path, "llama")
    told = one_by_one(Engine(tmp_path, monkeypatch, "c"), "c", 3)
    engine = Engine(tmp_path, monkeypatch, "c")
    first = engine.begin(plan_of(0, "c", {}))
    engine.ahead.drop("c")
    output = first.result().token_ids
    engine.ahead._sampler.drop("c")
    engine.ahead._sampler.add(RequestSpec("c", PROMPTS["c"], SAMPLING["c"], output_token_ids=output))
    again = StepPlan(1, ("c",), (0,), ((*PROMPTS["c"], *output),), ((7, 8),), (True,))
    second = engine.begin(again)
    assert second.result().token_ids == told[1].token_ids
    third = engine.begin(replace(plan_of(2, "c", {"c": NOT_YET}), block_tables=((7, 8),)))
    assert third.result().token_ids == told[2].token_ids
