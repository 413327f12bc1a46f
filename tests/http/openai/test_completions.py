"""Completions as their clients read them: echoed and scored prompts, the best of several, and what is refused."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from actorserve.core.effects import Deliver, End
from actorserve.core.messages import FinishReason, PromptLogprobs, RequestSpec, TokenLogprobs
from actorserve.settings import HttpSettings
from tests.http.fakes import END, TOKENIZER, ScriptedService, client_for, deliver, end

Json = dict[str, Any]
MESSAGES = [{"role": "user", "content": "hello"}]


def scores(spec: RequestSpec) -> PromptLogprobs:
    """Position p of the prompt has the log-probability -p and the rank 3; its best tokens are 0, 1, ..."""
    num_best = spec.sampling.prompt_logprobs
    token_ids: list[int] = []
    logprobs: list[float] = []
    ranks: list[int] = []
    for position, token_id in enumerate(spec.prompt_token_ids[1:], 1):
        token_ids += token_id, *range(num_best)
        logprobs += -float(position), *(-0.25 * (rank + 1) for rank in range(num_best))
        ranks += 3, *range(1, num_best + 1)
    return PromptLogprobs(num_best, tuple(token_ids), tuple(logprobs), tuple(ranks))


def scripted(text: str = "ho", reason: FinishReason = FinishReason.LENGTH) -> ScriptedService:
    """A service that does as a worker does: it answers with ``text``, and with the log-probabilities asked for."""

    def script(spec: RequestSpec) -> Iterable[Deliver | End]:
        token_ids = TOKENIZER.encode(text)[: spec.sampling.max_tokens]
        known = TokenLogprobs(-0.5, tuple(range(spec.sampling.top_logprobs)), (-0.5,) * spec.sampling.top_logprobs)
        for index, token_id in enumerate(token_ids):
            effect = deliver((token_id,), (known,) if spec.sampling.top_logprobs >= 0 else ())
            if index == 0 and spec.sampling.prompt_logprobs >= 0:
                effect = replace(effect, prompt_logprobs=scores(spec))
            yield effect
        yield end(reason)

    return ScriptedService(script)


async def post(
    service: ScriptedService,
    route: str = "completions",
    settings: HttpSettings | None = None,
    headers: dict[str, str] | None = None,
    **fields: Any,
) -> tuple[int, Json]:
    async with client_for(service, settings) as client:
        response = await client.post(f"/v1/{route}", json=fields, headers=headers)
    assert all(request.released.is_set() for request in service.requests)
    return response.status_code, response.json()


async def choices(service: ScriptedService, **fields: Any) -> list[Json]:
    status, answer = await post(service, **fields)
    assert status == 200, answer
    return list(answer["choices"])


async def streamed(service: ScriptedService, **fields: Any) -> list[Json]:
    """The choices of a stream's chunks."""
    async with client_for(service) as client:
        response = await client.post("/v1/completions", json=fields | {"stream": True})
    assert response.status_code == 200, response.text
    return _chunks(response.text)


def _chunks(text: str) -> list[Json]:
    data = [event.removeprefix("data: ") for event in text.split("\n\n")[:-2]]
    return [json.loads(item)["choices"][0] for item in data]


# --- echo ------------------------------------------------------------------------------------------------------------


async def test_echo_puts_the_prompt_before_the_text() -> None:
    """Each choice of each prompt begins with its prompt, and workers score no prompt if the client wants no scores."""
    service = scripted()
    answers = await choices(service, prompt=["ab", "hello"], echo=True, n=2)
    assert [answer["text"] for answer in answers] == ["abho", "abho", "helloho", "helloho"]
    assert all(answer["logprobs"] is None for answer in answers)
    assert {spec.sampling.prompt_logprobs for spec in service.specs} == {-1}


async def test_echo_with_logprobs_covers_prompt_and_output() -> None:
    """The columns hold the prompt's tokens first; the first has no log-probability, and offsets count from the prompt's
    start."""
    service = scripted()
    [answer] = await choices(service, prompt="hi hello", echo=True, logprobs=1, max_tokens=2)
    prompt = [TOKENIZER.token_text(token_id) for token_id in service.specs[0].prompt_token_ids]
    logprobs = answer["logprobs"]
    assert answer["text"] == "hi helloho"
    assert logprobs["tokens"] == [*prompt, "h", "o"]
    assert logprobs["tokens"] == ["h", "i", " ", "hello", "h", "o"]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 8, 9]
    assert logprobs["token_logprobs"] == [None, -1.0, -2.0, -3.0, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][3] == {"hello": -3.0, TOKENIZER.token_text(0): -0.25}
    assert service.specs[0].sampling.prompt_logprobs == 1


async def test_a_streamed_echo_is_the_same_answer() -> None:
    """The chunks of a stream, put together, hold the same text and columns as the whole answer."""
    fields: Json = {"prompt": "hi hello", "echo": True, "logprobs": 2}
    [whole] = await choices(scripted(), **fields)
    chunks = await streamed(scripted(), **fields)
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    for column, values in whole["logprobs"].items():
        assert [value for chunk in chunks if chunk["logprobs"] for value in chunk["logprobs"][column]] == values


async def test_no_output_tokens_leave_the_prompt_alone() -> None:
    """With max_tokens 0 and echo the answer is the prompt, with its log-probabilities and no completion tokens."""
    service = scripted()
    status, answer = await post(service, prompt=["ab", "hello"], echo=True, max_tokens=0, logprobs=0)
    assert status == 200
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "hello"]
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.0]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == 3
    chunks = await streamed(scripted(), prompt="hello", echo=True, max_tokens=0)
    assert [(chunk["text"], chunk["finish_reason"]) for chunk in chunks] == [("hello", None), ("", "length")]


async def test_a_scored_continuation_as_lm_eval_asks_for_it() -> None:
    """Token ids, echo, one output token: as many entries as the prompt has tokens, and one, even if that one is a stop
    token, which has no text."""
    service = scripted("<|end|>", FinishReason.STOP)
    prompts = [TOKENIZER.encode("hello you"), TOKENIZER.encode("ab")]
    answers = await choices(service, prompt=prompts, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234)
    for answer, prompt in zip(answers, prompts, strict=True):
        assert all(len(column) == len(prompt) + 1 for column in answer["logprobs"].values())
        assert answer["logprobs"]["token_logprobs"][1:-1] == [-float(n) for n in range(1, len(prompt))]
        assert answer["logprobs"]["tokens"][-1] == "<|end|>"
        assert answer["text"] == TOKENIZER.decode(prompt)


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_of_a_prompt_share_its_scores(stream: bool) -> None:
    """Only the first choice's request scores a prompt, and all choices echo its scores, whichever begins first."""
    service = ScriptedService()
    fields: Json = {"prompt": ["abc", "de"], "echo": True, "logprobs": 1, "n": 2, "stream": stream}
    async with client_for(service) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=fields))
        answers = scripted()
        for index in (3, 1, 2, 0):
            request = await service.request(index)
            assert answers.script is not None
            request.feed(answers.script(request.spec))
            await asyncio.sleep(0.01)
        response = await asking
    assert [spec.sampling.prompt_logprobs for spec in service.specs] == [1, -1, 1, -1]
    texts: dict[int, str] = defaultdict(str)
    logprobs: dict[int, list[float | None]] = defaultdict(list)
    for choice in _chunks(response.text) if stream else response.json()["choices"]:
        texts[choice["index"]] += choice["text"]
        logprobs[choice["index"]] += (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
    assert [texts[index] for index in range(4)] == ["abcho", "abcho", "deho", "deho"]
    first, second = [None, -1.0, -2.0, -0.5, -0.5], [None, -1.0, -0.5, -0.5]
    assert [logprobs[index] for index in range(4)] == [first, first, second, second]


async def test_choices_of_a_prompt_share_its_prompt_logprobs() -> None:
    """Every choice of a prompt shows the scores that the first one's request brought, also the best of several."""
    answers = await choices(scripted(), prompt=["abc", "de"], prompt_logprobs=1, n=2, best_of=3)
    assert [len(answer["prompt_logprobs"]) for answer in answers] == [3, 3, 2, 2]


async def test_an_echo_shows_special_tokens_and_joins_characters() -> None:
    """A special token of the prompt is shown as its text, and a character that begins in the prompt and ends in the
    output appears once."""
    euro = TOKENIZER.encode("€")
    assert len(euro) == 3
    service = ScriptedService(lambda _: [deliver(euro[2:]), end(FinishReason.LENGTH)])
    [answer] = await choices(service, prompt=[END, *euro[:2]], echo=True)
    assert answer["text"] == "<|end|>€"


async def test_stop_strings_are_not_searched_in_the_prompt() -> None:
    """A prompt that holds a stop string is echoed whole; the output stops at it."""
    [answer] = await choices(scripted("xby"), prompt="abc", echo=True, stop="b")
    assert (answer["text"], answer["finish_reason"]) == ("abcx", "stop")


# --- prompt_logprobs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_best", [0, 2])
async def test_prompt_logprobs_have_vllms_form(num_best: int) -> None:
    """A list with null first, and then objects by token id with log-probability, rank and text."""
    service = scripted()
    [answer] = await choices(service, prompt=[104, 256], prompt_logprobs=num_best)
    first, second = answer["prompt_logprobs"]
    assert first is None
    own = {"logprob": -1.0, "rank": 3, "decoded_token": TOKENIZER.token_text(256)}
    best = {
        str(token_id): {
            "logprob": -0.25 * (token_id + 1),
            "rank": token_id + 1,
            "decoded_token": TOKENIZER.token_text(token_id),
        }
        for token_id in range(num_best)
    }
    assert second == {"256": own} | best
    assert answer["logprobs"] is None
    assert service.specs[0].sampling.top_logprobs == -1


async def test_a_chats_prompt_logprobs() -> None:
    """A chat has the field beside its choices; an answer without them has null."""
    service = scripted()
    status, answer = await post(service, "chat/completions", messages=MESSAGES, prompt_logprobs=1)
    assert status == 200
    assert len(answer["prompt_logprobs"]) == len(service.specs[0].prompt_token_ids)
    assert answer["prompt_logprobs"][0] is None
    status, answer = await post(scripted(), "chat/completions", messages=MESSAGES)
    assert answer["prompt_logprobs"] is None
    [choice] = await choices(scripted(), prompt="x")
    assert choice["prompt_logprobs"] is None


async def test_echo_and_prompt_logprobs_have_lengths_of_their_own() -> None:
    """Workers find as many best tokens as the longer of both wants, and each form shows as many as it asked for."""
    service = scripted()
    [answer] = await choices(service, prompt="abc", echo=True, logprobs=1, prompt_logprobs=3)
    assert service.specs[0].sampling.prompt_logprobs == 3
    assert [len(entry or ()) for entry in answer["prompt_logprobs"]] == [0, 4, 4]
    assert [len(entry or ()) for entry in answer["logprobs"]["top_logprobs"][:3]] == [0, 2, 2]


# --- best_of ---------------------------------------------------------------------------------------------------------


async def test_best_of_returns_the_likeliest_completions() -> None:
    """Of three completions the two with the highest mean log-probability come, the best first, without
    log-probabilities that nobody asked for; all generated tokens count."""
    means = iter([-3.0, -1.0, -2.0])

    def script(_: RequestSpec) -> Iterable[Deliver | End]:
        mean = next(means)
        text = {-3.0: "c", -1.0: "aaaa", -2.0: "bb"}[mean]
        token_ids = TOKENIZER.encode(text)
        return [deliver(token_ids, (TokenLogprobs(mean, (), ()),) * len(token_ids)), end(FinishReason.LENGTH)]

    service = ScriptedService(script)
    status, answer = await post(service, prompt="x", n=2, best_of=3)
    assert status == 200
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "aaaa"), (1, "bb")]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 7
    assert len({spec.sampling.seed for spec in service.specs}) == 3


async def test_best_of_as_many_as_wanted_changes_nothing() -> None:
    """best_of equal to n, as many clients send it, needs no log-probabilities and may be streamed."""
    service = scripted()
    await streamed(service, prompt="x", best_of=1)
    assert service.specs[0].sampling.top_logprobs == -1


# --- other fields ----------------------------------------------------------------------------------------------------


async def test_tokens_can_be_named_by_their_ids() -> None:
    """return_tokens_as_token_ids names tokens whose text is not unique or not whole."""
    [answer] = await choices(scripted(), prompt="x", logprobs=1, return_tokens_as_token_ids=True)
    assert answer["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in TOKENIZER.encode("ho")]
    assert "token_id:0" in answer["logprobs"]["top_logprobs"][0]


async def test_the_chosen_token_stands_before_the_best_ones() -> None:
    """Clients of vLLM take the first entry of top_logprobs for the chosen token."""
    [answer] = await choices(scripted(), prompt="x", logprobs=2)
    assert [next(iter(best)) for best in answer["logprobs"]["top_logprobs"]] == ["h", "o"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "the end"}, "suffix"),
        ({"suffix": ""}, "suffix"),
        ({"echo": "yes"}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 17}, "best_of"),
        ({"best_of": 9, "prompt": ["a", "b"]}, "best_of"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 20, "prompt": ["x" * 190] * 16}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 20, "prompt": ["x" * 190] * 16}, "logprobs"),
    ],
)
async def test_wrong_fields_are_refused_by_name(fields: Json, param: str) -> None:
    """A wrong or unsupported value is a 400 that names its field, and nothing is submitted."""
    service = ScriptedService()
    settings = HttpSettings(max_prompt_logprobs=10_000)
    body: Json = {"prompt": "x"} | fields
    status, answer = await post(service, settings=settings, **body)
    assert status == 400
    assert answer["error"]["param"] == param
    assert param in answer["error"]["message"]
    assert not service.requests


async def test_nulls_mean_defaults() -> None:
    """Clients that send every field, with null for the unused ones, are served."""
    unused: Json = dict.fromkeys(
        ("echo", "best_of", "suffix", "prompt_logprobs", "add_special_tokens", "return_tokens_as_token_ids")
    )
    [answer] = await choices(scripted(), prompt="x", **unused)
    assert answer["text"] == "ho"


# --- how long an answer may take -------------------------------------------------------------------------------------


async def test_a_late_answer_fails() -> None:
    """Without output in time the status is 408, and the request is released."""
    service = ScriptedService()
    status, answer = await post(service, prompt="x", headers={"x-request-timeout": "0.05"})
    assert (status, answer["error"]["code"]) == (408, "timeout")
    assert "0.05 seconds" in answer["error"]["message"]


async def test_a_late_stream_ends_with_an_error_event() -> None:
    """A stream that has begun gets its text so far, an error event, and [DONE]."""
    service = ScriptedService(lambda _: [deliver(TOKENIZER.encode("ho"))])
    async with client_for(service, HttpSettings(max_answer_s=0.2)) as client:
        fields = {"prompt": "x", "stream": True}
        response = await client.post("/v1/completions", json=fields, headers={"x-request-timeout": "50"})
    assert response.status_code == 200
    text, error, done, _ = response.text.split("\n\n")
    assert json.loads(text.removeprefix("data: "))["choices"][0]["text"] == "ho"
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "timeout"
    assert done == "data: [DONE]"
    assert service.requests[0].released.is_set()


@pytest.mark.parametrize("value", ["", ".", "0", "-1", "+1", "1_0", "1e1", "nan", "inf", "soon", "1" * 33])
async def test_a_wrong_timeout_is_refused(value: str) -> None:
    """The header must be a positive number in decimal digits; otherwise nothing is submitted."""
    service = ScriptedService()
    status, answer = await post(service, prompt="x", headers={"x-request-timeout": value})
    assert (status, answer["error"]["param"]) == (400, "x-request-timeout")
    assert not service.requests


async def test_an_answer_in_time_is_whole() -> None:
    """A limit that is not reached changes nothing."""
    status, answer = await post(scripted(), prompt="x", headers={"x-request-timeout": "20"})
    assert (status, answer["choices"][0]["text"]) == (200, "ho")
