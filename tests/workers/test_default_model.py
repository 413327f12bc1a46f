"""The default model: greedy answers are the reference's, and tokens are the same whatever else is computed."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from actorserve.core.messages import RequestSpec, SamplingParams, StepPlan
from actorserve.model_files.describe import describe
from workers.engine_options import EngineOptions
from workers.engines.torch_engine import TorchEngine

pytestmark = pytest.mark.model

KV_BYTES = 128 * 2**20
NEAR_TIE = 1e-4
CHUNKS = (1, 17, 100, 512)

EngineOf = Callable[[int], TorchEngine]


@pytest.fixture(scope="module")
def engine_of(default_model_path: Path) -> EngineOf:
    """The engine with so many tokens a block; one each."""
    description = describe(default_model_path)
    engines: dict[int, TorchEngine] = {}

    def get(tokens_per_block: int) -> TorchEngine:
        if tokens_per_block not in engines:
            engines[tokens_per_block] = TorchEngine(
                description, EngineOptions(dtype="float32", tokens_per_block=tokens_per_block, kv_cache_bytes=KV_BYTES)
            )
        return engines[tokens_per_block]

    return get


def prompt(length: int) -> tuple[int, ...]:
    source = random.Random(length)
    return tuple(source.randrange(20, 49152) for _ in range(length))


def generate(engine: TorchEngine, schedule: Any, requests: list[RequestSpec]) -> dict[str, list[int]]:
    """Play the requests to their ends; each one's output tokens."""
    for request in requests:
        engine.add(request)

    def run(plan: StepPlan) -> tuple[int, ...]:
        return engine.step(plan).token_ids

    limits = {request.request_id: len(request.prompt_token_ids) + request.sampling.max_tokens for request in requests}
    results = schedule.play({r.request_id: r.prompt_token_ids for r in requests}, run, limits, CHUNKS)
    outputs = {}
    for request in requests:
        engine.drop(request.request_id)
        end = limits[request.request_id]
        outputs[request.request_id] = [
            results[request.request_id, at] for at in range(len(request.prompt_token_ids) - 1, end - 1)
        ]
    return outputs


@pytest.fixture
def reference(default_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' own reading of the file. (``from_pretrained`` would want the package accelerate for it.)"""
    for slow in ("GGUFReader", "get_tensor_name_map"):  # which it calls again and again for the same
        monkeypatch.setattr(gguf, slow, cache(getattr(gguf, slow)))
    model: Any = LlamaForCausalLM(
        AutoConfig.from_pretrained(default_model_path.parent, gguf_file=default_model_path.name)
    )
    read: Any = load_gguf_checkpoint
    loaded = read(str(default_model_path), return_tensors=True, model_to_load=model)
    assert model.load_state_dict(loaded["tensors"], strict=False).missing_keys == ["lm_head.weight"]
    model.tie_weights()
    return model.eval()


def test_greedy_tokens_are_the_references(reference: Any, engine_of: EngineOf, make_schedule: Any) -> None:
    """After prompts of 1 to 1,000 tokens each greedy token is transformers', but where its two best nearly tie."""
    engine = engine_of(16)
    for length in (1, 2, 16, 64, 65, 300, 1000):
        greedy = SamplingParams(seed=0, max_tokens=6, temperature=0.0)
        request = RequestSpec("r", prompt(length), greedy)
        schedule = make_schedule(engine.num_blocks, 16, seed=length, preempts=False)
        output = generate(engine, schedule, [request])["r"]
        with torch.no_grad():
            tokens = torch.tensor([request.prompt_token_ids + tuple(output[:-1])])
            logits = reference(tokens, logits_to_keep=len(output)).logits[0]
        best = logits.topk(2).values
        for at, token in enumerate(output):
            if best[at, 0] - best[at, 1] > NEAR_TIE:
                assert token == int(logits[at].argmax()), f"token {at} after {length} tokens"


def test_tokens_are_the_same_in_any_company(engine_of: EngineOf, make_schedule: Any) -> None:
    """Greedy and seeded tokens are the same alone and in mixed batches of 16, in any chunks, blocks, preemptions."""
    requests = [
        RequestSpec(f"r{n}", prompt(length), SamplingParams(seed=n, max_tokens=4, temperature=0.8 if n % 2 else 0.0))
        for n, length in enumerate((1, 2, 4, 9, 17, 30, 47, 60, 62, 64, 70, 81, 99, 120, 150, 222))
    ]
    engine = engine_of(16)
    alone: dict[str, list[int]] = {}
    for request in requests:
        alone |= generate(engine, make_schedule(engine.num_blocks, 16, seed=0, preempts=False), [request])
    other = engine_of(24)
    schedule = make_schedule(other.num_blocks, 24, seed=0)
    assert generate(other, schedule, requests) == alone
    assert schedule.num_preemptions > 0
