"""What an API key may use in a minute, over all gateways of a host."""

import hashlib
from pathlib import Path

import httpx
import pytest

from actorserve.http.access.api_keys import ApiKey, ApiKeys
from actorserve.http.access.key_limits import KeyLimits
from actorserve.http.app import create_app
from actorserve.http.host_counts import HostCounts
from actorserve.http.metrics.names import KEY_GENERATION_TOKENS, KEY_PROMPT_TOKENS, KEY_REQUESTS
from actorserve.settings import HttpSettings
from tests.http.fakes import DESCRIPTION, TOKENIZER, says

DIGEST = hashlib.sha256(b"right").digest()
KEY = ApiKey("team", DIGEST, 0, 0, requests_per_minute=6, tokens_per_minute=600)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Gateway:
    """A gateway's limits, and what it counts."""

    def __init__(self, folder: Path, name: str, clock: Clock) -> None:
        self.counts = HostCounts(folder, name)
        self.limits = KeyLimits(self.counts, clock)

    def use(self, *, requests: float = 0, prompt: float = 0, output: float = 0) -> None:
        for name, number in ((KEY_REQUESTS, requests), (KEY_PROMPT_TOKENS, prompt), (KEY_GENERATION_TOKENS, output)):
            self.counts.values[self.counts.cell((name, "team"))] += number


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gateways(tmp_path: Path, clock: Clock) -> tuple[Gateway, Gateway]:
    return Gateway(tmp_path, "gateway-0", clock), Gateway(tmp_path, "gateway-1", clock)


def test_requests_of_a_minute(gateways: tuple[Gateway, Gateway], clock: Clock) -> None:
    """A minute's requests may come at once, to any gateway of the host; then one comes free every sixtieth part."""
    one, other = gateways
    assert one.limits.check(KEY) is other.limits.check(KEY) is None
    for number in range(6):
        assert gateways[number % 2].limits.check(KEY) is None
        gateways[number % 2].use(requests=1)
    for gateway in gateways:
        beyond = gateway.limits.check(KEY)
        assert beyond is not None
        assert (beyond.limit, beyond.per_minute) == ("requests_per_minute", 6)
        assert beyond.retry_after_s == pytest.approx(10.0)
    clock.now_s += 10.0
    assert one.limits.check(KEY) is None
    one.use(requests=1)
    assert other.limits.check(KEY) is not None


def test_tokens_of_a_minute(gateways: tuple[Gateway, Gateway], clock: Clock) -> None:
    """Prompts and outputs count together. A key that has used more than its allowance waits until that is made up."""
    one, other = gateways
    assert one.limits.check(KEY) is other.limits.check(KEY) is None
    one.use(prompt=500)
    assert other.limits.check(KEY) is None
    other.use(output=400)
    beyond = one.limits.check(KEY)
    assert beyond is not None
    assert beyond.limit == "tokens_per_minute"
    assert beyond.retry_after_s == pytest.approx(30.0)
    clock.now_s += 30.1
    assert one.limits.check(KEY) is None


def test_idle_time_saves_one_minute_at_most(gateways: tuple[Gateway, Gateway], clock: Clock) -> None:
    """After an hour's rest a key has one minute's allowance, not sixty."""
    one, _ = gateways
    one.limits.check(KEY)
    clock.now_s += 3600.0
    for _ in range(6):
        assert one.limits.check(KEY) is None
        one.use(requests=1)
    assert one.limits.check(KEY) is not None


def test_a_restarted_gateway_grants_no_debt(tmp_path: Path, clock: Clock) -> None:
    """What was counted before a gateway's start does not count against its keys."""
    Gateway(tmp_path, "gateway-0", clock).use(requests=1000, prompt=10**6)
    assert Gateway(tmp_path, "gateway-0", clock).limits.check(KEY) is None


async def test_requests_beyond_a_limit_get_429(clock: Clock) -> None:
    """The answer names the limit and says when to come back; refusals are counted, and do not count as requests."""
    key = ApiKey("team", DIGEST, 0, 0, requests_per_minute=2)
    app = create_app(says("a"), TOKENIZER, None, DESCRIPTION, HttpSettings(), api_keys=ApiKeys([key]), clock=clock)
    headers = {"authorization": "Bearer right"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        answers = [await client.post("/v1/completions", json={"prompt": "x"}) for _ in range(5)]
        page = (await client.get("/metrics")).text
        clock.now_s += 30.0
        later = await client.post("/v1/completions", json={"prompt": "x"})
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429, 429]
    assert answers[2].headers["retry-after"] == "30"
    assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
    assert "2 requests a minute" in answers[2].json()["error"]["message"]
    assert later.status_code == 200
    assert 'actorserve_key_requests_total{key="team"} 2.0' in page
    assert 'actorserve_key_refusals_total{key="team",limit="requests_per_minute"} 3.0' in page


async def test_tokens_are_charged_as_they_are_made(clock: Clock) -> None:
    """An answer that uses more tokens than are left is whole; the next request waits."""
    key = ApiKey("team", DIGEST, 0, 0, tokens_per_minute=4)
    app = create_app(says("abcdef"), TOKENIZER, None, DESCRIPTION, HttpSettings(), api_keys=ApiKeys([key]), clock=clock)
    headers = {"authorization": "Bearer right"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        first = await client.post("/v1/completions", json={"prompt": "xy"})
        second = await client.post("/v1/completions", json={"prompt": "xy"})
    assert (first.status_code, second.status_code) == (200, 429)
    assert second.headers["retry-after"] == "60"
