"""A large answer does not delay the others, although it takes long to write."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from actorserve.core.effects import Deliver, End
from actorserve.core.messages import FinishReason, ModelInfo, PromptLogprobs, RequestSpec
from tests.http.fakes import DEADLINE_S, MODEL, VOCAB_SIZE, ScriptedService, client_for, delivered, end

NUM_TOKENS = 16_384


def scored(spec: RequestSpec) -> Iterable[Deliver | End]:
    """One token, and for each token of the prompt its log-probability and that of the best token."""
    rows = 2 * (len(spec.prompt_token_ids) - 1)
    known = PromptLogprobs(1, (104,) * rows, (-0.5,) * rows, (1,) * rows)
    yield replace(delivered("a", -0.5), prompt_logprobs=known)
    yield end(FinishReason.LENGTH)


@pytest.mark.parametrize(
    "fields",
    [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}, {"echo": True, "logprobs": 1, "stream": True}],
    ids=["prompt_logprobs", "echo", "echo streamed"],
)
async def test_a_large_answer_is_written_in_a_thread(fields: dict[str, Any]) -> None:
    """The event loop spends little of the time that an answer of 32,768 log-probabilities takes."""
    service = ScriptedService(scored)
    service.model = ModelInfo(MODEL, VOCAB_SIZE, 2 * NUM_TOKENS)
    body = {"prompt": [104] * NUM_TOKENS, "max_tokens": 1, **fields}
    async with client_for(service) as client, asyncio.timeout(DEADLINE_S):
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        await service.request()
        of_loop_s, of_all_s = time.thread_time(), time.process_time()
        answer = await asking
        of_loop_s, of_all_s = time.thread_time() - of_loop_s, time.process_time() - of_all_s
    assert answer.status_code == 200
    assert of_loop_s < 0.3 * of_all_s
