"""The engine gives the reference's numbers, and the same bits in any batch."""

import json
import random
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from actorserve.core.messages import RequestSpec, SamplingParams, StepPlan
from actorserve.errors import SettingsError
from actorserve.model_files.grammars import GrammarCompiler, Vocabulary
from workers.engine_options import EngineOptions
from workers.engines.kind import kind_digest, platform_facts
from workers.engines.torch_engine import TorchEngine
from workers.kernels import choose as kernels
from workers.kernels.choose import Kernels
from workers.kernels.numerics import numerics
from workers.sampling import grammars

KV_BYTES = 4 * 2**20
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied, with biases": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "one kv head a head": {"num_key_value_heads": 6},
    "one kv head": {"num_key_value_heads": 1},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 5e5,
        }
    },
    "yarn": {
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 1e4,
        },
    },
}


def sequence(length: int, vocab_size: int, seed: int = 0) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.randrange(vocab_size) for _ in range(length))


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_are_the_references(make_model: Any, make_schedule: Any, changes: dict[str, Any]) -> None:
    """Logits of prefill and of step-by-step decode lie within 1e-3 of transformers', for every variant of the model."""
    model = make_model(**changes)
    engine = TorchEngine(model.description, EngineOptions(dtype="float32", kv_cache_bytes=KV_BYTES))
    tokens = sequence(150, 211)
    with torch.no_grad():
        expected = model.reference(torch.tensor([tokens])).logits[0]
    table = tuple(range(10))
    found = {
        99: engine.logits(StepPlan(0, ("a",), (0,), (tokens[:100],), (table,), (True,)))[0],
        **{
            at: engine.logits(StepPlan(at, ("a",), (at,), ((tokens[at],),), (table,), (True,)))[0]
            for at in range(100, 150)
        },
    }
    assert max((logits - expected[at]).abs().max() for at, logits in found.items()) < 1e-3


def test_prompt_logprobs_are_the_references(make_model: Any) -> None:
    """A prompt's log-probabilities, its tokens' ranks and the best tokens are those of transformers' logits."""
    model = make_model()
    engine = TorchEngine(model.description, EngineOptions(dtype="float32", kv_cache_bytes=KV_BYTES))
    tokens = sequence(150, 211)
    with torch.no_grad():
        expected = model.reference(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    engine.add(RequestSpec("a", tokens, SamplingParams(seed=0, max_tokens=1, prompt_logprobs=3)))
    done = engine.begin(StepPlan(1, ("a",), (0,), (tokens,), (tuple(range(10)),), (True,), (True,))).result()
    [found] = done.prompt_logprobs
    assert found is not None
    own, best = torch.tensor(found.logprobs).view(-1, 4).tensor_split([1], -1)
    following = torch.tensor(tokens[1:])[:, None]
    assert (own - expected.gather(-1, following)).abs().max() < 1e-3
    assert (best - expected.topk(3).values).abs().max() < 1e-3
    ranks = (expected > expected.gather(-1, following)).sum(-1) + 1
    assert (torch.tensor(found.ranks).view(-1, 4)[:, 0] == ranks).float().mean() > 0.98
    assert (torch.tensor(found.token_ids).view(-1, 4)[:, 1] == expected.argmax(-1)).float().mean() > 0.98


def test_bfloat16_is_near_float32(make_model: Any) -> None:
    """In bfloat16 the logits equal those in float32, within bfloat16's rounding."""
    model = make_model(initializer_range=0.1)
    plan = StepPlan(0, ("a",), (0,), (sequence(100, 211),), (tuple(range(7)),), (True,))
    exact, rounded = (
        TorchEngine(model.description, EngineOptions(dtype=dtype, kv_cache_bytes=KV_BYTES)).logits(plan)
        for dtype in ("float32", "bfloat16")
    )
    assert not torch.equal(exact, rounded)
    assert (exact - rounded).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize(
    ("dtype", "threads", "blocks", "changes"),
    [
        ("float32", 1, (5, 16, 24, 128), {}),
        ("float32", 2, (24,), {"intermediate_size": 1003}),
        ("float32", 1, (64,), {"num_key_value_heads": 6}),
        ("bfloat16", 1, (1, 16), {"attention_bias": True, "mlp_bias": True}),
        ("bfloat16", 2, (16,), {"hidden_size": 36}),
        ("int8", 1, (5, 16, 128), {}),
        ("int8", 2, (24,), {"intermediate_size": 1003, "attention_bias": True}),
        ("int4", 2, (16,), {"num_key_value_heads": 6}),
    ],
)
def test_logits_have_the_same_bits_in_any_batch(
    make_model: Any, make_schedule: Any, dtype: str, threads: int, blocks: tuple[int, ...], changes: dict[str, Any]
) -> None:
    """A request's logits are the same bits alone and in mixed batches, in any chunks, block size and preemptions."""
    description = make_model(**changes).description
    lengths = (1, 2, 5, 16, 31, 63, 64, 65, 70, 100, 128, 130, 140, 190, 200, 257)
    requests = {f"r{n}": sequence(length, 211, seed=length) for n, length in enumerate(lengths)}

    def engine(tokens_per_block: int) -> TorchEngine:
        return TorchEngine(
            description,
            EngineOptions(
                dtype=dtype, num_threads=threads, tokens_per_block=tokens_per_block, kv_cache_bytes=16 * KV_BYTES
            ),
        )

    first = engine(16)
    alone: dict[tuple[str, int], torch.Tensor] = {}
    for name, tokens in requests.items():
        schedule = make_schedule(first.num_blocks, 16, seed=0, preempts=False)
        alone |= schedule.play({name: tokens}, lambda plan: list(first.logits(plan)), chunks=(1,))
    num_preemptions = 0
    for tokens_per_block in blocks:
        other = engine(tokens_per_block)
        assert other.kind == first.kind
        schedule = make_schedule(other.num_blocks, tokens_per_block, seed=tokens_per_block)
        mixed = schedule.play(requests, lambda plan, other=other: list(other.logits(plan)))
        num_preemptions += schedule.num_preemptions
        common = alone.keys() & mixed.keys()
        assert {(name, len(tokens) - 1) for name, tokens in requests.items()} <= common
        assert all(torch.equal(alone[place], mixed[place]) for place in common)
    assert num_preemptions > 0


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_broken_neighbour_does_no_harm(make_model: Any, dtype: str) -> None:
    """NaN left in the pool by a former owner of blocks does not reach the next owner."""
    engine = TorchEngine(make_model().description, EngineOptions(dtype=dtype, kv_cache_bytes=KV_BYTES))
    plan = StepPlan(0, ("a",), (0,), (sequence(70, 211),), ((3, 1, 4, 5, 9),), (True,))
    clean = engine.logits(plan)
    with torch.inference_mode():
        engine._cache.pool.fill_(float("nan"))
    assert torch.equal(engine.logits(plan), clean)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_logits_of_a_prompt_are_those_of_its_tokens(make_model: Any, dtype: str) -> None:
    """A prompt's logits at each token have the same bits as when the tokens are fed one at a time."""
    engine = TorchEngine(make_model().description, EngineOptions(dtype=dtype, kv_cache_bytes=KV_BYTES))
    tokens, table = sequence(40, 211), (4, 0, 7)
    found = engine.prompt_logits(tokens)
    expected = [
        engine.logits(StepPlan(at, ("a",), (at,), ((token,),), (table,), (True,)))[0] for at, token in enumerate(tokens)
    ]
    assert torch.equal(found, torch.stack(expected))


def test_a_prompt_beyond_the_pool_has_no_logits(make_model: Any) -> None:
    """A prompt that does not fit the pool, and a prompt without a token, are ValueErrors."""
    engine = TorchEngine(make_model().description, EngineOptions(kv_cache_bytes=KV_BYTES // 64))
    most = engine.num_blocks * engine.tokens_per_block
    with pytest.raises(ValueError, match=f"{most + 1} tokens do not fit"):
        engine.prompt_logits((1,) * (most + 1))
    with pytest.raises(ValueError, match="token"):
        engine.prompt_logits(())


def test_a_step_samples_where_the_plan_says_so(make_model: Any) -> None:
    """A step reports only the sampling rows, at their output positions."""
    engine = TorchEngine(make_model().description, EngineOptions(kv_cache_bytes=KV_BYTES))
    for name in ("a", "b"):
        engine.add(RequestSpec(name, (1, 2, 3, 4), SamplingParams(seed=1, max_tokens=9, temperature=0.0)))
    done = engine.begin(StepPlan(7, ("a", "b"), (0, 0), ((1, 2), (1, 2, 3, 4)), ((0,), (1,)), (False, True))).result()
    assert (done.step_id, done.request_ids, done.positions, len(done.token_ids)) == (7, ("b",), (0,), 1)
    done = engine.begin(StepPlan(8, ("a",), (2,), ((3,),), ((0,),), (False,))).result()
    assert done.request_ids == ()
    assert done.token_ids == ()
    later = engine.begin(StepPlan(9, ("b",), (4,), ((5,),), ((1,),), (True,))).result()
    assert later.positions == (1,)
    engine.drop("a")
    engine.drop("unknown")


def test_a_plan_with_too_few_blocks_is_refused(make_model: Any) -> None:
    """A plan whose blocks cannot hold its tokens raises, and does not write into another request's block."""
    engine = TorchEngine(make_model().description, EngineOptions(kv_cache_bytes=KV_BYTES))
    with pytest.raises(ValueError, match="too few blocks"):
        engine.logits(StepPlan(0, ("a",), (10,), ((1,) * 7,), ((0,),), (True,)))


def test_the_kind_names_everything_that_decides_bits(make_model: Any) -> None:
    """Engines that give the same bits are of one kind; other weights, types or threads make another kind."""
    model = make_model()
    one, same, other_type = (
        TorchEngine(model.description, EngineOptions(dtype=dtype, tokens_per_block=block, kv_cache_bytes=KV_BYTES))
        for dtype, block in (("float32", 16), ("float32", 8), ("bfloat16", 16))
    )
    other_weights = TorchEngine(make_model(vocab_size=212).description, EngineOptions(kv_cache_bytes=KV_BYTES))
    assert one.kind == same.kind
    assert len({one.kind, other_type.kind, other_weights.kind}) == 3


def test_the_platform_tells_threads_and_cpu() -> None:
    """A kind's facts include the number of threads and the CPU's features; their order does not change the digest."""
    facts = platform_facts(torch.device("cpu"))
    assert facts["threads"] == torch.get_num_threads()
    assert facts["capability"]
    assert kind_digest(facts) == kind_digest(dict(reversed(facts.items())))
    assert kind_digest(facts) != kind_digest(facts | {"threads": 99})


def test_sizes_follow_the_settings(make_model: Any) -> None:
    """The pool has as many whole blocks as its bytes hold; pool and model bound a request's length."""
    description = make_model().description
    engine = TorchEngine(description, EngineOptions(dtype="float32", kv_cache_bytes=1_000_000, tokens_per_block=16))
    bytes_per_token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head_dim, float32
    assert engine.bytes_per_block == 16 * bytes_per_token
    assert engine.num_blocks == 1_000_000 // (16 * bytes_per_token)
    assert engine.model.max_tokens == 512
    assert engine.model.vocab_size == 211
    assert (
        TorchEngine(
            description, EngineOptions(dtype="float32", kv_cache_bytes=engine.bytes_per_block * 3)
        ).model.max_tokens
        == 48
    )
    assert (
        TorchEngine(description, EngineOptions(kv_cache_bytes=KV_BYTES, max_context_tokens=100)).model.max_tokens == 100
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_bytes": 100}, "holds no block"),
        ({"max_context_tokens": 513}, "512 positions"),
        ({"dtype": "float8"}, "dtype float8"),
    ],
)
def test_settings_that_do_not_fit_are_refused(make_model: Any, settings: dict[str, Any], message: str) -> None:
    """A setting that model or machine cannot meet gives an error of one line that names it."""
    with pytest.raises(SettingsError, match=message):
        TorchEngine(make_model().description, EngineOptions(**settings))


def test_dynamic_scaling_reaches_beyond_the_trained_context(make_model: Any) -> None:
    """A model with dynamic scaling may be served with a longer context, as a kind of its own."""
    description = make_model(**VARIANTS["dynamic"]).description
    usual, longer = (
        TorchEngine(description, EngineOptions(kv_cache_bytes=KV_BYTES, max_context_tokens=limit))
        for limit in (None, 1000)
    )
    assert (usual.model.max_tokens, longer.model.max_tokens) == (512, 1000)
    assert usual.kind != longer.kind


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_keeps_the_promise_too(make_model: Any, make_schedule: Any, dtype: str) -> None:
    """On a GPU, too, logits are the reference's in float32, and the same bits alone and in mixed batches."""
    model = make_model(hidden_size=96, head_dim=16)
    requests = {f"r{n}": sequence(20 + 25 * n, 211, seed=n) for n in range(16)}
    engines = [
        TorchEngine(
            model.description,
            EngineOptions(device="cuda", dtype=dtype, tokens_per_block=block, kv_cache_bytes=32 * KV_BYTES),
        )
        for block in (16, 24)
    ]
    alone: dict[tuple[str, int], torch.Tensor] = {}
    for name, tokens in requests.items():
        schedule = make_schedule(engines[0].num_blocks, 16, seed=0, preempts=False)
        alone |= schedule.play({name: tokens}, lambda plan: list(engines[0].logits(plan)))
    mixed = make_schedule(engines[1].num_blocks, 24, seed=1).play(requests, lambda plan: list(engines[1].logits(plan)))
    assert all(torch.equal(alone[place], mixed[place]) for place in alone.keys() & mixed.keys())
    if dtype == "float32":
        for name, tokens in requests.items():
            with torch.no_grad():
                expected = model.reference(torch.tensor([tokens])).logits[0, -1]
            assert (alone[name, len(tokens) - 1].cpu() - expected).abs().max() < 1e-3


def test_every_number_of_a_mode_and_our_code_are_in_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode with another width of the output layer is another kind, and so is another version of the code."""
    cpu = torch.device("cpu")
    mode = numerics("int8", cpu)
    before = kind_digest(Kernels(mode, cpu, native=False).facts())
    assert kind_digest(Kernels(replace(mode, head_bits=None), cpu, native=False).facts()) != before
    monkeypatch.setattr(kernels, "_code_digest", lambda: "another")
    assert kind_digest(Kernels(mode, cpu, native=False).facts()) != before


def test_masks_are_made_while_the_model_runs(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step begins its masks before the model, and needs them only when the model is done."""
    model_is_done = threading.Event()

    make_masks = grammars._make_all

    def wait_for_the_model(masks: Any) -> None:
        assert model_is_done.wait(60)
        make_masks(masks)

    monkeypatch.setattr(grammars, "_make_all", wait_for_the_model)
    tokens = [bytes([token_id]) for token_id in range(210)] + [b"<end>"]
    compiler = GrammarCompiler(Vocabulary(tokens, (210,), (210,)))
    monkeypatch.setattr("workers.engines.torch_engine.compiler_for", lambda _: compiler)
    engine = TorchEngine(make_model().description, EngineOptions(dtype="float32", kv_cache_bytes=KV_BYTES))
    forward = engine._model.forward

    def forward_and_tell(*arguments: Any) -> torch.Tensor:
        hidden = forward(*arguments)
        model_is_done.set()
        return hidden

    monkeypatch.setattr(engine._model, "forward", forward_and_tell)
    grammar = json.dumps({"grammars": [{"lark_grammar": 'start: "a"'}]})
    for name, text in (("a", grammar), ("bad", "no grammar")):
        request = RequestSpec(name, (1, 2), SamplingParams(seed=0, max_tokens=9, grammar=text))
        engine.add(request, engine.prepare(request))
    done = engine.begin(StepPlan(0, ("bad", "a"), (0, 0), ((1, 2), (1, 2)), ((0,), (1,)), (True, True))).result()
    assert (done.request_ids, done.token_ids, done.failed) == (("a",), (ord("a"),), ("bad",))
