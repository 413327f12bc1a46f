"""The predictor that learns: its classes, what is left of a request, and bounded memory."""

import pytest
from hypothesis import given, strategies as st

from actorserve.core.messages import Peer, RequestSpec, SamplingParams
from actorserve.core.prediction.learned import LearnedLengths
from actorserve.core.prediction.predictor import LimitedLengths
from actorserve.core.request import Request

lengths = st.lists(st.integers(1, 1000), min_size=1, max_size=40)


def request(*beginning: int, client: str = "", salt: str = "", max_tokens: int = 1000, num_prompt: int = 40) -> Request:
    """A request whose prompt begins with 16 times each of these tokens."""
    tokens = [token for token in beginning for _ in range(16)]
    prompt = (*tokens, *(0 for _ in range(num_prompt - len(tokens))))
    spec = RequestSpec("r", prompt, SamplingParams(seed=0, max_tokens=max_tokens), cache_salt=salt, client=client)
    return Request(spec, 1, Peer("gateway-0", 1))


def learn(learned: LearnedLengths, one: Request, *found: int) -> None:
    for length in found:
        learned.forecast(one).ended(length)


def test_nothing_is_known_before_a_request_has_ended() -> None:
    """A new predictor says so, and so does one whose outputs were all shorter than what a request has generated."""
    learned = LearnedLengths()
    assert learned.forecast(request(1)).rest(0) is None
    learn(learned, request(1), 3, 7)
    assert learned.forecast(request(1)).rest(7) is None


@given(lengths, st.integers(0, 1000))
def test_what_is_left_is_the_mean_of_the_longer_outputs(found: list[int], num_output: int) -> None:
    """Only outputs that went on tell how a request that goes on continues."""
    learned = LearnedLengths()
    learn(learned, request(1), *found)
    longer = [length - num_output for length in found if length > num_output]
    rest = learned.forecast(request(1)).rest(num_output)
    assert rest is None if not longer else rest is not None and abs(rest - sum(longer) / len(longer)) < 1e-9


def test_prompts_that_begin_alike_are_a_class() -> None:
    """A template's outputs are told apart from another's, and an unknown prompt gets the mean of all."""
    learned = LearnedLengths()
    for _ in range(64):
        learn(learned, request(1), 5)
        learn(learned, request(2), 305)
    assert learned.forecast(request(1)).rest(0) == 5.0
    assert learned.forecast(request(2)).rest(0) == 305.0
    assert learned.forecast(request(3, salt="new")).rest(0) == 155.0


def test_a_longer_beginning_tells_more() -> None:
    """Prompts with a common system prompt differ by what follows it, as soon as that is known."""
    learned = LearnedLengths()
    for _ in range(64):
        learn(learned, request(9, 1, 1, 1, num_prompt=64), 10)
        learn(learned, request(9, 2, 2, 2, num_prompt=64), 50)
    assert learned.forecast(request(9, 1, 1, 1, num_prompt=64)).rest(0) == 10.0
    assert learned.forecast(request(9, 2, 2, 2, num_prompt=64)).rest(0) == 50.0
    assert learned.forecast(request(9, 3, 3, 3, num_prompt=64)).rest(0) == 30.0


def test_a_class_with_few_outputs_counts_for_little() -> None:
    """Its mean is drawn to that of wider classes, and less so the more of its requests have ended."""
    learned = LearnedLengths()
    learn(learned, request(1), *[100] * 64)
    rests = []
    for _ in range(6):
        learn(learned, request(2), 10)
        rest = learned.forecast(request(2)).rest(0)
        assert rest is not None
        rests.append(rest)
    assert 10.0 < rests[-1] < rests[0] < 100.0
    assert rests == sorted(rests, reverse=True)


def test_old_outputs_are_forgotten() -> None:
    """A class follows a change of its lengths, because only the latest ones count."""
    learned = LearnedLengths()
    learn(learned, request(1), *[100] * 500)
    learn(learned, request(1), *[10] * 256)
    assert learned.forecast(request(1)).rest(0) == 10.0


@pytest.mark.parametrize(("a", "b"), [(("a", ""), ("b", "")), (("", "a"), ("", "b")), (("a", "b"), ("ab", ""))])
def test_tenants_share_no_class(a: tuple[str, str], b: tuple[str, str]) -> None:
    """What one API key's or salt's template generates says nothing of another's same template.

    A new prompt of a known tenant is expected to be like the tenant's others.
    """
    learned = LearnedLengths()
    of_a, of_b = request(1, client=a[0], salt=a[1]), request(1, client=b[0], salt=b[1])
    learn(learned, of_a, *[10] * 64)
    learn(learned, of_b, *[90] * 64)
    assert learned.forecast(of_a).rest(0) == 10.0
    assert learned.forecast(of_b).rest(0) == 90.0
    assert learned.forecast(request(5, client=b[0], salt=b[1])).rest(0) == 90.0


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 99)), max_size=80), st.integers(4, 9))
def test_memory_is_bounded(happened: list[tuple[int, int]], most: int) -> None:
    """However many prompts come, it knows no more classes than it may, and has forgotten those not used for longest."""
    learned = LearnedLengths(max_classes=most)
    for token, length in happened:
        learn(learned, request(token), length)
        assert len(learned) <= most
        assert learned.forecast(request(token)).rest(0) is not None


def test_the_same_requests_teach_the_same() -> None:
    """Two predictors that saw the same requests end forecast the same, whatever their process."""
    forecasts = []
    for _ in range(2):
        learned = LearnedLengths(max_classes=7)
        for number in range(200):
            learn(learned, request(number % 11), 1 + number * 37 % 101)
        forecasts.append([learned.forecast(request(token)).rest(4) for token in range(11)])
    assert forecasts[0] == forecasts[1]


def test_no_more_is_expected_than_a_request_may_generate() -> None:
    """A request's ``max_tokens`` bounds what another predictor expects; where that knows nothing, nothing is known."""
    learned = LearnedLengths()
    limited = LimitedLengths(learned)
    assert limited.forecast(request(1, max_tokens=20)).rest(0) is None
    limited.forecast(request(1)).ended(100)
    forecast = limited.forecast(request(1, max_tokens=20))
    assert (forecast.rest(0), forecast.rest(15)) == (20.0, 5.0)
    assert limited.forecast(request(1, max_tokens=200)).rest(0) == 100.0
