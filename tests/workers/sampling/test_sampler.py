"""The sampler equals a plain reference, and a row's token does not depend on other rows."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from actorserve.core.messages import RequestSpec, SamplingParams, TokenLogprobs
from actorserve.core.rng import uniform
from workers import native
from workers.sampling.logprobs import LEAST_LOGPROB, read_logprobs, score_tokens
from workers.sampling.sampler import Sampler


@pytest.fixture(scope="module", autouse=True, params=["torch", "native"])
def choice(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run every test with torch's functions, and with our own kernel for CPUs."""
    is_native = request.param == "native"
    if is_native and not native.load():
        pytest.skip(native.describe())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPTIONS, "is_native", is_native)
        yield


OPTIONS = {"is_native": False}


def make_sampler(vocab_size: int, device: torch.device | str = "cpu") -> Sampler:
    return Sampler(vocab_size, device, OPTIONS["is_native"] and torch.device(device).type == "cpu")


def request_for(
    name: str = "r", prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **fields: Any
) -> RequestSpec:
    return RequestSpec(name, prompt, SamplingParams(**{"seed": 1, "max_tokens": 99} | fields), output)


def sample(logits: Tensor, *requests: RequestSpec, position: int | None = None) -> tuple[int, ...]:
    """One call of a fresh sampler, each request at its next position (or at ``position``)."""
    sampler = make_sampler(logits.shape[-1], logits.device)
    for request in requests:
        sampler.add(request)
    positions = [len(request.output_token_ids) if position is None else position for request in requests]
    return sampler(logits.clone(), [request.request_id for request in requests], positions).token_ids


def one(logits: list[float], position: int | None = None, **fields: Any) -> int:
    return sample(torch.tensor([logits]), request_for(**fields), position=position)[0]


def tokens_at(logits: list[float], count: int = 300, **fields: Any) -> set[int]:
    """The tokens that come up within the first ``count`` positions."""
    sampler = make_sampler(len(logits))
    sampler.add(request_for(**fields))
    return {sampler(torch.tensor([logits]), ["r"], [position]).token_ids[0] for position in range(count)}


# --- against a plain reference ---------------------------------------------------------------------------------------


def reference_weights(logits: list[float], request: RequestSpec) -> list[float]:
    """Probabilities of the next token, by the rules in their plain form for a single row."""
    params, position = request.sampling, len(request.output_token_ids)
    values = list(logits)
    for token, bias in params.logit_bias:
        values[token] += bias
    for token in params.stop_token_ids if position < params.min_tokens else ():
        values[token] = -math.inf
    for token in range(len(values)):
        count = request.output_token_ids.count(token)
        if count or token in request.prompt_token_ids:
            factor = params.repetition_penalty
            values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        values[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    best = max(values)
    if params.temperature == 0:
        return [float(token == values.index(best)) for token in range(len(values))]
    weights = [math.exp((value - best) / params.temperature) for value in values]
    weights = [weight if weight >= params.min_p else 0.0 for weight in weights]
    if params.top_k:
        least = sorted(weights, reverse=True)[min(params.top_k, len(weights)) - 1]
        weights = [weight if weight >= least else 0.0 for weight in weights]
    if params.top_p < 1:
        mass, least, wanted = 0.0, math.inf, params.top_p * sum(weights)
        for weight in sorted(weights, reverse=True):
            if least < math.inf and mass >= wanted:
                break
            mass, least = mass + weight, weight
        weights = [weight if weight >= least else 0.0 for weight in weights]
    total = sum(weights)
    return [weight / total for weight in weights]


VOCAB_SIZE = 23
token_ids = st.integers(0, VOCAB_SIZE - 1)
sampling_params = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**63),
    max_tokens=st.just(99),
    min_tokens=st.integers(0, 4),
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.05]),
    top_k=st.sampled_from([0, 1, 3, 10, 1000]),
    min_p=st.sampled_from([0.0, 0.01, 0.2]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.25, 0.5]),
    logit_bias=st.dictionaries(token_ids, st.sampled_from([-100.0, -1.5, 2.0, 5.0]), max_size=3).map(
        lambda bias: tuple(bias.items())
    ),
    stop_token_ids=st.lists(token_ids, max_size=3).map(tuple),
)
requests = st.builds(
    RequestSpec,
    request_id=st.just("r"),
    prompt_token_ids=st.lists(token_ids, max_size=6).map(tuple),
    sampling=sampling_params,
    output_token_ids=st.lists(token_ids, max_size=6).map(tuple),
)
# Multiples of 1/8 are often equal, and exact in float32 and float64, so ties are ties in both.
rows = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(requests, rows), min_size=1, max_size=5))
def test_equals_the_plain_reference(cases: list[tuple[RequestSpec, list[float]]]) -> None:
    """Any mixture of parameters gives the token at which the reference's cumulative probability passes the uniform."""
    batch = [replace(request, request_id=f"r{index}") for index, (request, _) in enumerate(cases)]
    chosen = sample(torch.tensor([row for _, row in cases]), *batch)
    for request, (_, row), token in zip(batch, cases, chosen, strict=True):
        weights = reference_weights(row, request)
        number = uniform(request.sampling.seed, len(request.output_token_ids)) * (request.sampling.temperature > 0)
        assert weights[token] > 0
        assert sum(weights[:token]) <= number + 1e-6
        assert sum(weights[: token + 1]) >= number - 1e-6


@pytest.mark.parametrize(("vocab_size", "scale"), [(5000, 0.01), (5000, 1.0), (40000, 1.5), (40000, 8.0)])
@pytest.mark.parametrize("top_k", [0, 300])
def test_top_p_is_exact_however_flat_the_logits(vocab_size: int, scale: float, top_k: int) -> None:
    """The kept set is the same whether a hundred candidates suffice or nearly the whole vocabulary is kept."""
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3)) * scale
    fields: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": top_k}
    weights = reference_weights(logits.tolist(), request_for(**fields))
    cumulative = torch.tensor(weights, dtype=torch.float64).cumsum(0)
    for seed in range(20):
        token = sample(logits.unsqueeze(0), request_for(**{**fields, "seed": seed}))[0]
        assert weights[token] > 0
        assert abs(token - int(torch.searchsorted(cumulative, uniform(seed, 0)))) <= 1


def test_frequencies_are_the_probabilities() -> None:
    """Over 4000 positions each token comes as often as its probability says, within five deviations."""
    logits = [1.0, 0.0, -1.0, 2.0, -8.0]
    sampler = make_sampler(5)
    sampler.add(request_for(temperature=1.3))
    counts = [0] * 5
    for position in range(4000):
        counts[sampler(torch.tensor([logits]), ["r"], [position]).token_ids[0]] += 1
    for count, p in zip(counts, (torch.tensor(logits) / 1.3).softmax(0).tolist(), strict=True):
        assert abs(count - 4000 * p) <= 5 * math.sqrt(4000 * p * (1 - p)) + 1


# --- the same tokens in any batch ------------------------------------------------------------------------------------


def mixed_requests(count: int, vocab_size: int) -> list[RequestSpec]:
    """Requests that combine all sampling features."""
    made = []
    for i in range(count):
        fields: dict[str, Any] = {
            "temperature": (0.0, 0.7, 1.0, 1.5)[i % 4],
            "top_p": (1.0, 0.9, 1.0)[i % 3],
            "top_k": (0, 0, 40, 0, 5)[i % 5],
            "min_p": (0.0, 0.05)[i % 2],
            "repetition_penalty": (1.0, 1.3)[i // 2 % 2],
            "frequency_penalty": (0.0, 0.4, 0.0)[i % 3],
            "logit_bias": (((i * 7) % vocab_size, 3.0),) if i % 4 == 1 else (),
            "top_logprobs": (-1, 0, 5)[i % 3],
            "min_tokens": i % 7,
            "stop_token_ids": (3, 5, vocab_size - 1),
        }
        output = tuple(range(i % 6, 6))
        made.append(request_for(f"r{i}", prompt=tuple(range(i, i + 9)), output=output, **{**fields, "seed": i}))
    return made


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def check_batches(vocab_size: int, device: str, sizes: list[int]) -> None:
    requests = mixed_requests(64, vocab_size)
    generator = torch.Generator().manual_seed(11)
    # A few tokens stand out, as in a language model; bfloat16 makes equals.
    logits = torch.randn(64, vocab_size, generator=generator) * 2
    logits[:, : vocab_size // 50] *= 3
    logits = logits.bfloat16().float().to(device)

    def run(rows: list[int]) -> list[tuple[int, TokenLogprobs | None]]:
        sampler = make_sampler(vocab_size, device)
        for row in rows:
            sampler.add(requests[row])
        names = [requests[row].request_id for row in rows]
        done = sampler(logits[rows], names, [len(requests[row].output_token_ids) for row in rows])
        return list(zip(done.token_ids, done.logprobs, strict=True))

    alone = [run([row])[0] for row in range(64)]
    for size in sizes:
        picked = torch.randperm(64, generator=generator)[:size].tolist()
        assert run(picked) == [alone[row] for row in picked]


@pytest.mark.parametrize("vocab_size", [997, 40009])  # the larger is shared by threads, unevenly
def test_a_row_is_the_same_bits_in_any_batch(vocab_size: int, threads: int) -> None:
    """With one thread and two, a row's token and log-probabilities are equal alone and in batches of up to 64."""
    check_batches(vocab_size, "cpu", [*range(1, 10), 15, 16, 17, 31, 33, 64] if vocab_size < 1000 else [2, 3, 64])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("vocab_size", [997, 49152, 128256])
def test_a_row_is_the_same_bits_in_any_batch_on_cuda(vocab_size: int) -> None:
    """On CUDA a row's token and log-probabilities are equal alone and in batches of up to 64."""
    check_batches(vocab_size, "cuda", [2, 3, 16, 17, 33, 64])


def test_a_token_depends_on_seed_and_position_alone() -> None:
    """The request's name and the order of asking do not matter; the seed and the position do."""
    logits = torch.zeros(1, 1000)
    assert sample(logits, request_for("a")) == sample(logits, request_for("b"))
    sampler = make_sampler(1000)
    sampler.add(request_for())
    forth = [sampler(logits.clone(), ["r"], [p]).token_ids for p in range(20)]
    back = [sampler(logits.clone(), ["r"], [p]).token_ids for p in reversed(range(20))]
    assert back[::-1] == forth
    assert len(set(forth)) > 15
    assert len({sample(logits, request_for(seed=seed)) for seed in range(20)}) > 15


# --- one rule each ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("threads")
def test_greedy_takes_the_lowest_id_among_equals() -> None:
    """Equal best logits give the lowest token id, in a small vocabulary and in one that threads share."""
    assert one([0.0, 2.0, 2.0, 1.0], temperature=0.0) == 1
    logits = torch.zeros(3, 100_000)
    logits[:, 40_000:] = 1.0
    greedy = [request_for(name, temperature=0.0) for name in "abc"]
    assert sample(logits, *greedy) == (40_000,) * 3


def test_equal_logits_are_kept_together() -> None:
    """top_k and top_p keep all tokens that equal the last one kept."""
    assert tokens_at([1.0, 2.0, 1.0, 0.0, 1.0], top_k=2) == {0, 1, 2, 4}
    assert tokens_at([1.0, 3.0, 1.0, 0.0, 1.0], top_p=0.8) == {0, 1, 2, 4}
    assert tokens_at([1.0, 2.0, 1.0], top_p=0.0) == {1}


def test_min_p_is_relative_to_the_best_token() -> None:
    """Tokens below min_p times the best one's probability never come."""
    logits = [0.0, math.log(0.5), math.log(0.3), math.log(0.19)]
    assert tokens_at(logits, min_p=0.2) == {0, 1, 2}


def test_tiny_and_huge_temperatures() -> None:
    """A temperature near zero is greedy and a huge one uniform, without overflow."""
    assert tokens_at([0.0, 1.0, 0.5], count=20, temperature=1e-300) == {1}
    assert tokens_at([0.0, 80.0, -80.0], temperature=1e300) == {0, 1, 2}


def test_min_tokens_masks_stop_tokens_until_then() -> None:
    """A stop token cannot come before min_tokens outputs, however likely, and can from then on."""
    fields = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (1,), "logit_bias": ((1, 50.0),)}
    assert [one([1.0, 9.0, 0.0], position=p, **fields) for p in range(4)] == [0, 0, 1, 1]


def test_logit_bias_adds_and_ignores_unknown_tokens() -> None:
    """A bias is added to its token's logit; ids outside the vocabulary change nothing."""
    assert one([1.0, 0.0, 0.5], temperature=0.0, logit_bias=((1, 1.5), (99, 5.0), (-1, 5.0))) == 1
    assert (
        one([1.0, 0.0], temperature=0.0, prompt=(77,), repetition_penalty=2.0, stop_token_ids=(50,), min_tokens=9) == 0
    )


def test_penalties_look_at_the_right_tokens() -> None:
    """Repetition counts prompt and output, presence and frequency the output alone, frequency each occurrence."""
    logits = [2.0, 1.9, -1.0]
    assert one(logits, temperature=0.0, prompt=(0,), repetition_penalty=2.0) == 1
    assert one(logits, temperature=0.0, prompt=(0,), presence_penalty=2.0, frequency_penalty=2.0) == 0
    assert one(logits, temperature=0.0, output=(0,), presence_penalty=0.2) == 1
    assert one(logits, temperature=0.0, output=(0,), frequency_penalty=0.06) == 0
    assert one(logits, temperature=0.0, output=(0, 0), frequency_penalty=0.06) == 1


PENALISED: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "presence_penalty": 0.2,
    "temperature": 0.9,
}


def logits_at(position: int) -> Tensor:
    return torch.randn(1, 50, generator=torch.Generator().manual_seed(position)) * 2


def continue_from(sampler: Sampler, start: int, end: int) -> list[int]:
    return [sampler(logits_at(p), ["r"], [p]).token_ids[0] for p in range(start, end)]


@pytest.mark.parametrize("cut", [0, 1, 100, 199])
def test_failover_continues_with_the_same_tokens(cut: int) -> None:
    """A worker that gets the earlier output continues with the tokens that the first worker would have made."""
    request = request_for(prompt=(1, 2, 3), **PENALISED)
    first, second = make_sampler(50), make_sampler(50)
    first.add(request)
    whole = continue_from(first, 0, 200)
    second.add(replace(request, output_token_ids=tuple(whole[:cut])))
    assert continue_from(second, cut, 200) == whole[cut:]


def test_a_position_may_be_sampled_again() -> None:
    """Sampling a position again gives the same tokens, and with other logits the tokens of a fresh sampler."""
    sampler = make_sampler(50)
    sampler.add(request_for(prompt=(1, 2, 3), **PENALISED))
    whole = continue_from(sampler, 0, 40)
    assert continue_from(sampler, 39, 40) == whole[39:]
    assert continue_from(sampler, 5, 40) == whole[5:]
    assert continue_from(sampler, 0, 40) == whole


def test_unknown_history_is_an_error() -> None:
    """A penalised request cannot be sampled at a position whose earlier tokens are not known."""
    with pytest.raises(ValueError, match="only 0 tokens"):
        one([0.0, 1.0], position=3, presence_penalty=1.0)


def test_a_row_without_finite_logits_harms_no_other() -> None:
    """NaN and infinite rows give some token of the vocabulary, and leave their batch-mates' tokens as they were."""
    good = torch.randn(1, 300, generator=torch.Generator().manual_seed(1))
    bad = torch.full((3, 300), math.nan)
    bad[1], bad[2] = math.inf, -math.inf
    for fields in ({}, {"top_p": 0.5}, {"temperature": 0.0}, {"top_logprobs": 3}):
        batch = [request_for(name, **fields) for name in "abcd"]
        chosen = sample(torch.cat((bad[:1], good, bad[1:])), *batch)
        assert chosen[1] == sample(good, batch[1])[0]
        assert all(0 <= token < 300 for token in chosen)


# --- log-probabilities -----------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_logits() -> None:
    """Log-probabilities are the log-softmax of the model's logits, before temperature, bias and penalties."""
    logits = torch.randn(2, 3000, generator=torch.Generator().manual_seed(2)) * 3
    sampler = make_sampler(3000)
    sampler.add(request_for("a", prompt=(1,), top_logprobs=20, logit_bias=((7, 100.0),), temperature=0.5, top_k=3))
    sampler.add(request_for("b"))
    done = sampler(logits.clone(), ["b", "a"], [0, 0])
    wanted = logits[1].double().log_softmax(0)
    best = wanted.topk(20)
    assert done.token_ids[1] == 7
    assert done.logprobs[0] is None
    found = done.logprobs[1]
    assert found is not None
    assert found.top_token_ids == tuple(best.indices.tolist())
    assert found.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-6)
    assert found.logprob == pytest.approx(float(wanted[7]), abs=1e-6)


def test_equal_logprobs_come_in_order_of_ids() -> None:
    """Among equal logits the lower ids are listed, and listed first, even if zeros differ in sign."""
    logits = torch.zeros(1, 500)
    logits[0, 300:], logits[0, 0] = 1.0, -0.0
    for k in (3, 200, 203):
        sampler = make_sampler(500)
        sampler.add(request_for(top_logprobs=k, temperature=0.0))
        found = sampler(logits.clone(), ["r"], [0]).logprobs[0]
        assert found is not None
        assert found.top_token_ids == (*range(300, 500), 0, 1, 2)[:k]


def test_logprobs_are_finite_numbers() -> None:
    """Impossible tokens and broken rows have the least log-probability, because JSON has neither infinity nor NaN."""
    for row in ([0.0, -math.inf], [math.nan, 0.0], [0.0, -2e4]):
        sampler = make_sampler(2)
        sampler.add(request_for(top_logprobs=2, logit_bias=((1, 3e4),), temperature=0.0))
        found = sampler(torch.tensor([row]), ["r"], [0]).logprobs[0]
        assert found is not None
        assert min(found.logprob, *found.top_logprobs) == LEAST_LOGPROB
        assert len(found.top_token_ids) == 2


# --- misuse ----------------------------------------------------------------------------------------------------------


def test_misuse_raises() -> None:
    """Unknown requests, wrong shapes and wrong types raise, and an empty batch is fine."""
    sampler = make_sampler(4)
    sampler.add(request_for())
    assert sampler(torch.zeros(0, 4), [], []).token_ids == ()
    with pytest.raises(ValueError, match="batch, 4"):
        sampler(torch.zeros(1, 5), ["r"], [0])
    with pytest.raises(ValueError, match="positions"):
        sampler(torch.zeros(1, 4), ["r"], [])
    with pytest.raises(ValueError, match="float32"):
        sampler(torch.zeros(1, 4, dtype=torch.bfloat16), ["r"], [0])
    sampler.drop("r")
    sampler.drop("r")
    with pytest.raises(KeyError):
        sampler(torch.zeros(1, 4), ["r"], [0])
    with pytest.raises(ValueError, match="vocabulary"):
        make_sampler(0)


def test_a_prompts_tokens_are_scored_with_ranks() -> None:
    """Each token has its own entry and the best tokens' entries; equals rank by id; NaN gives the least value."""
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [0.0, math.nan, 1.0, 2.0]])
    found = score_tokens(logits, [2, 0], 2)
    assert found.num_best == 2
    assert found.token_ids[:3] == (2, 1, 2)
    assert found.ranks[:3] == (2, 1, 2)
    log_softmax = logits[0].log_softmax(-1).tolist()
    assert found.logprobs[:3] == pytest.approx([log_softmax[token] for token in (2, 1, 2)])
    assert found.token_ids[3] == 0
    assert found.logprobs[3:] == (LEAST_LOGPROB,) * 3


def test_a_prompt_is_scored_as_its_output_would_be() -> None:
    """The same logits give a token the same bits, whether it was sampled or belongs to a prompt; a request for more
    tokens than the vocabulary has gets all of them.
    """
    logits = torch.randn(40, 997, generator=torch.Generator().manual_seed(3))
    tokens = list(range(100, 140))
    sampled = read_logprobs(logits, tokens, [5] * 40)
    scored = score_tokens(logits, tokens, 5)
    assert [scored.logprobs[6 * row] for row in range(40)] == [entry.logprob for entry in sampled]
    assert [scored.token_ids[6 * row + 1 : 6 * row + 6] for row in range(40)] == [
        entry.top_token_ids for entry in sampled
    ]
    assert score_tokens(logits[:, :3].contiguous(), [0] * 40, 9).num_best == 3
