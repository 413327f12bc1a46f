"""kill -9 in the middle of 16 streams: clients see a pause, but lose no token and get no different token."""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from actorserve.core.instance.state import InstanceState
from actorserve.model_files.describe import describe
from tests.e2e.server import Server, instance_of, running, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.model]

NUM_STREAMS = 16
MAX_TOKENS = 32
TOKENS_PER_BLOCK = 16
NUM_BLOCKS = 24  # too few for all requests: some wait, some are preempted and prefilled again
MAX_BATCH_REQUESTS = 4
MAX_BATCH_TOKENS = 20
TPOT_TARGET_S = 0.1
VICTIM = "worker-0"
CONFIG = f"""
[cluster]
[model]
# The slowest number format, so that a worker can be stopped in the middle of its work.
dtype = "float32"
[workers]
count = 2
tokens_per_block = {TOKENS_PER_BLOCK}
kv_cache_bytes = {{kv_cache_bytes}}
max_batch_requests = {MAX_BATCH_REQUESTS}
max_batch_tokens = {MAX_BATCH_TOKENS}
# So that repeated prompts are prefilled again.
prefix_cache = false
tpot_target_s = {TPOT_TARGET_S}
[supervision]
max_restarts = 1000
max_backoff_s = 0.2
"""


@dataclass(frozen=True)
class Answer:
    """An answer as its client sees it, except for its timing."""

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None


@pytest.fixture(scope="module")
def bytes_per_block(default_model_path: Path) -> int:
    config = describe(default_model_path).config
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * 4 * TOKENS_PER_BLOCK


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, default_model_path: Path, bytes_per_block: int
) -> Iterator[Server]:
    config = CONFIG.format(kv_cache_bytes=NUM_BLOCKS * bytes_per_block)
    with running(tmp_path_factory.mktemp("kill"), config, "--model", str(default_model_path)) as server:
        server.wait_workers(2)
        yield server


async def ask(server: Server, number: int) -> Answer:
    """Stream one answer. Even numbers are decoded greedily, odd ones are sampled, and every fourth answer begins with
    its prompt, which workers score.
    """
    prompt = f"Story number {number}. " + "Once upon a time there was a small house by the sea. " * 2
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        stream = await client.completions.create(
            model=server.model,
            prompt=prompt,
            max_tokens=MAX_TOKENS,
            temperature=0.8 if number % 2 else 0.0,
            seed=1000 + number,
            logprobs=1,
            echo=number % 4 == 2,
            stream=True,
        )
        text, tokens, logprobs, finish_reason = "", [], [], None
        async for chunk in stream:
            choice = chunk.choices[0]
            text += choice.text
            if choice.logprobs is not None:
                tokens += choice.logprobs.tokens or []
                logprobs += [value for value in choice.logprobs.token_logprobs or [] if value is not None]
            finish_reason = choice.finish_reason or finish_reason
        return Answer(text, tuple(tokens), tuple(logprobs), finish_reason)


async def ask_all(server: Server) -> list[Answer]:
    return await asyncio.gather(*(ask(server, number) for number in range(NUM_STREAMS)))


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[Answer]:
    answers = asyncio.run(ask_all(server))
    assert all(len(answer.tokens) >= MAX_TOKENS or answer.finish_reason == "stop" for answer in answers)
    assert all(len(answer.logprobs) == len(answer.tokens) - (number % 4 == 2) for number, answer in enumerate(answers))
    assert all(answer.text.startswith("Story") == (number % 4 == 2) for number, answer in enumerate(answers))
    assert len({answer.text for answer in answers}) > NUM_STREAMS // 2
    return answers


def victims_state(server: Server) -> InstanceState:
    """The victim's core, replayed from its journal."""
    return instance_of(server.journal(VICTIM))


def stages(state: InstanceState) -> set[str]:
    """The stages of the instance's requests."""
    found = set()
    for request in state.requests.values():
        if not request.is_started:
            found.add("waiting")
        else:
            found.add("decoding" if request.num_uncomputed == 1 else "prefilling")
    return found


EVERY_STAGE = {"waiting", "prefilling", "decoding"}


def stop_in_every_stage(server: Server) -> None:
    """Freeze the victim when it owns requests that wait, prefill and decode."""

    def frozen_in_every_stage() -> bool:
        server.signal(VICTIM, signal.SIGSTOP)
        if stages(victims_state(server)) == EVERY_STAGE:
            return True
        server.signal(VICTIM, signal.SIGCONT)
        return False

    wait_until(frozen_in_every_stage, "a victim with requests that wait, prefill and decode")


@pytest.mark.parametrize("victims", [[VICTIM], ["coordinator"], [VICTIM, "coordinator"]], ids="+".join)
def test_killed_processes_cost_no_token(
    server: Server, undisturbed: list[Answer], victims: list[str], kill_round: int
) -> None:
    """A worker, the coordinator or both are killed under 16 streams; all clients get their undisturbed answers."""
    server.wait_workers(2)
    failovers = server.metric("actorserve_failovers_total")

    async def disturbed() -> list[Answer]:
        answers = asyncio.create_task(ask_all(server))
        await asyncio.to_thread(stop_in_every_stage, server)
        pids = [server.pid(name) for name in victims]
        for pid in pids:
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        if VICTIM in victims:
            assert stages(victims_state(server)) == EVERY_STAGE
        else:
            server.signal(VICTIM, signal.SIGCONT)
        return await answers

    assert asyncio.run(disturbed()) == undisturbed
    if VICTIM in victims:
        assert server.metric("actorserve_failovers_total") > failovers
    wait_until(lambda: server.metric("vllm:kv_cache_usage_perc") == 0.0, "all blocks free")
