"""All operations of the document, in its order. A test names a route that is missing here."""

from actorserve.http.openai.completion_request import CompletionRequest
from actorserve.http.openai.requests import ChatRequest
from actorserve.http.openai.tokenizing import Detokenize, TokenizeText
from actorserve.http.openapi import answers
from actorserve.http.openapi.operation import Example, Operation

_READING = (400, 404, 408, 413, 415, 429, 503)
_GENERATING = (400, 403, 404, 408, 413, 415, 429, 503)
_QUESTION = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 8}
_PROMPT = {"prompt": "Once upon a time", "max_tokens": 8}

OPERATIONS = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "Continue a chat, whole or as a stream of events",
        {200: answers.ChatCompletion},
        request=ChatRequest,
        event=answers.ChatCompletionChunk,
        errors=_GENERATING,
        examples={
            "plain": Example(_QUESTION),
            "stream": Example(_QUESTION | {"stream": True, "stream_options": {"include_usage": True}}),
            "choices": Example(_QUESTION | {"n": 2, "seed": 7, "temperature": 0.8, "top_p": 0.9, "stop": ["\n\n"]}),
            "log-probabilities": Example(_QUESTION | {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1}),
            "unknown model": Example(_QUESTION | {"model": "no-such-model"}, status=404),
            "wrong value": Example(_QUESTION | {"temperature": -1}, status=400),
        },
    ),
    Operation(
        "POST",
        "/v1/completions",
        "Continue texts or lists of token ids, whole or as a stream of events",
        {200: answers.Completion},
        request=CompletionRequest,
        event=answers.Completion,
        errors=_GENERATING,
        examples={
            "plain": Example(_PROMPT),
            "stream": Example(
                _PROMPT | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
            ),
            "several prompts": Example({"prompt": ["One", "Two"], "max_tokens": 4, "temperature": 0}),
            "token ids": Example({"prompt": [1, 2, 3], "max_tokens": 4, "logprobs": 1}),
            "score a prompt": Example({"prompt": [1, 2, 3], "max_tokens": 1, "logprobs": 1, "echo": True}),
            "the best": Example(_PROMPT | {"best_of": 3, "prompt_logprobs": 0}),
            "suffix": Example(_PROMPT | {"suffix": "The end."}, status=400),
            "too long": Example(_PROMPT | {"max_tokens": 2_000_000_000}, status=400),
        },
    ),
    Operation(
        "GET",
        "/v1/models",
        "List the names of the served model",
        {200: answers.ModelList},
    ),
    Operation(
        "GET",
        "/v1/models/{model}",
        "Show the card of a name; names may have slashes",
        {200: answers.ModelCard},
        errors=(404, 503),
        examples={"unknown model": Example(path={"model": "org/no-such-model"}, status=404)},
    ),
    Operation(
        "GET",
        "/health",
        "Whether a worker is up; it needs no key",
        {200: answers.Health, 503: answers.Health},
    ),
    Operation(
        "GET",
        "/ping",
        "As /health",
        {200: answers.Health, 503: answers.Health},
    ),
    Operation(
        "POST",
        "/ping",
        "As /health",
        {200: answers.Health, 503: answers.Health},
    ),
    Operation(
        "GET",
        "/health_generate",
        "Whether a worker makes a token in time",
        {200: answers.GenerationHealth, 503: answers.GenerationHealth},
        errors=(400,),
    ),
    Operation(
        "POST",
        "/tokenize",
        "Show the tokens of a text, or of a chat, whose fields are those of /v1/chat/completions",
        {200: answers.Tokens},
        request=TokenizeText,
        errors=_READING,
        examples={
            "plain": Example({"prompt": "Once upon a time", "return_token_strs": True}),
            "no text": Example({"prompt": None}, status=400),
        },
    ),
    Operation(
        "POST",
        "/detokenize",
        "Show the text of token ids",
        {200: answers.Text},
        request=Detokenize,
        errors=_READING,
        examples={
            "plain": Example({"tokens": [1, 2, 3]}),
            "no token": Example({"tokens": [-1]}, status=400),
        },
    ),
    Operation(
        "GET",
        "/metrics",
        "Show metrics in Prometheus' text format",
        {200: None},
    ),
    Operation(
        "GET",
        "/version",
        "Show the server's version",
        {200: answers.Version},
    ),
    Operation(
        "GET",
        "/openapi.json",
        "Show this document",
        {200: answers.OpenAPIDocument},
    ),
)
