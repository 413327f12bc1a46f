"""The default model gives the reference's greedy answers, and the same tokens in any batch."""

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
    """Makes one engine for each block size."""
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


def generate(
    engine: TorchEngine, schedule: Any, requests: list[RequestSpec], chunks: tuple[int, ...] = (512,)
) -> dict[str, list[int]]:
    """Play the requests to their ends, prompts in chunks of these sizes; returns each request's output tokens."""
    for request in requests:
        engine.add(request)

    def run(plan: StepPlan) -> tuple[int, ...]:
        return engine.begin(plan).result().token_ids

    limits = {request.request_id: len(request.prompt_token_ids) + request.sampling.max_tokens for request in requests}
    results = schedule.play({r.request_id: r.prompt_token_ids for r in requests}, run, limits, chunks)
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
    """The file as transformers reads it. (``from_pretrained`` would need the package accelerate.)"""
    for slow in ("GGUFReader", "get_tensor_name_map"):  # transformers calls both again and again with equal arguments
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
    """After prompts of 1 to 600 tokens each greedy token is transformers', unless its two best logits nearly tie."""
    engine = engine_of(16)
    for length in (1, 16, 64, 65, 600):
        greedy = SamplingParams(seed=0, max_tokens=6, temperature=0.0)
        request = RequestSpec("r", prompt(length), greedy)
        schedule = make_schedule(engine.num_blocks, 16, seed=length, preempts=False)
        output = generate(engine, schedule, [request], CHUNKS)["r"]
        with torch.no_grad():
            tokens = torch.tensor([request.prompt_token_ids + tuple(output[:-1])])
            logits = reference(tokens, logits_to_keep=len(output)).logits[0]
        best = logits.topk(2).values
        for at, token in enumerate(output):
            if best[at, 0] - best[at, 1] > NEAR_TIE:
                assert token == int(logits[at].argmax()), f"token {at} after {length} tokens"


def test_tokens_are_the_same_in_any_batch(engine_of: EngineOf, make_schedule: Any) -> None:
    """Tokens are the same alone and in mixed batches of 16, in any chunks and block sizes, and after preemption."""
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
    assert generate(other, schedule, requests, CHUNKS) == alone
    assert schedule.num_preemptions > 0
