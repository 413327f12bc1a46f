"""All operations of the document, in its order. A test names a route that is missing here."""

from actorserve.http.anthropic.requests import CountTokensRequest, MessagesRequest
from actorserve.http.openai.chat.requests import ChatRequest
from actorserve.http.openai.completions.requests import CompletionRequest
from actorserve.http.openai.responses.requests import ResponsesRequest
from actorserve.http.openai.tokenizing import Detokenize, TokenizeChat, TokenizeText
from actorserve.http.openapi import answers, message_answers, response_answers
from actorserve.http.openapi.operation import Example, Operation

_READING = (400, 404, 408, 413, 415, 429, 503)
_GENERATING = (400, 403, 404, 408, 413, 415, 429, 503)
_QUESTION = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 8}
_CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
_WEATHER = {"name": "weather", "description": "Tells the weather of a city.", "parameters": _CITY}
_INPUT = {"input": "Tell me a story.", "max_output_tokens": 8}
_MESSAGES = {"model": "", "messages": [{"role": "user", "content": "Tell me a story."}]}
_MESSAGES_FAIL_WITH = (400, 403, 404, 408, 413, 415, 429, 529)
_STORED = {"response_id": "resp_1"}
_PROMPT = {"prompt": "Once upon a time", "max_tokens": 8}

OPERATIONS = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "Continue a chat, whole or as a stream of events",
        {200: answers.ChatCompletion},
        requests=(ChatRequest,),
        event=answers.ChatCompletionChunk,
        errors=_GENERATING,
        examples={
            "plain": Example(_QUESTION),
            "stream": Example(_QUESTION | {"stream": True, "stream_options": {"include_usage": True}}),
            "choices": Example(_QUESTION | {"n": 2, "seed": 7, "temperature": 0.8, "top_p": 0.9, "stop": ["\n\n"]}),
            "log-probabilities": Example(_QUESTION | {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1}),
            "token ids": Example(_QUESTION | {"return_token_ids": True, "stream": True}),
            "energy": Example(_QUESTION | {"return_energy": True}),
            "tools": Example(_QUESTION | {"tools": [{"type": "function", "function": _WEATHER}]}),
            "a JSON schema": Example(
                _QUESTION
                | {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": _CITY}}}
            ),
            "unknown model": Example(_QUESTION | {"model": "no-such-model"}, status=404),
            "wrong value": Example(_QUESTION | {"temperature": -1}, status=400),
        },
    ),
    Operation(
        "POST",
        "/v1/completions",
        "Continue texts or lists of token ids, whole or as a stream of events",
        {200: answers.Completion},
        requests=(CompletionRequest,),
        event=answers.Completion,
        errors=_GENERATING,
        examples={
            "plain": Example(_PROMPT),
            "stream": Example(
                _PROMPT | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
            ),
            "several prompts": Example({"prompt": ["One", "Two"], "max_tokens": 4, "temperature": 0}),
            "token ids": Example({"prompt": [1, 2, 3], "max_tokens": 4, "return_token_ids": True}),
            "score a prompt": Example({"prompt": [1, 2, 3], "max_tokens": 1, "logprobs": 1, "echo": True}),
            "a regular expression": Example(_PROMPT | {"structured_outputs": {"regex": "[0-9]{4}"}}),
            "the best": Example(_PROMPT | {"best_of": 3, "prompt_logprobs": 0}),
            "suffix": Example(_PROMPT | {"suffix": "The end."}, status=400),
            "too long": Example(_PROMPT | {"max_tokens": 2_000_000_000}, status=400),
        },
    ),
    Operation(
        "POST",
        "/v1/responses",
        "Answer the items of an input, whole or as a stream of typed events; nothing is stored",
        {200: response_answers.Response},
        requests=(ResponsesRequest,),
        event=response_answers.ResponseEvent,
        errors=_GENERATING,
        examples={
            "plain": Example(_INPUT),
            "stream": Example(_INPUT | {"stream": True}),
            "items": Example(
                {
                    "instructions": "Be brief.",
                    "input": [
                        {"role": "user", "content": [{"type": "input_text", "text": "Hello!"}]},
                        {"role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]},
                        {"role": "user", "content": "Tell me a story."},
                    ],
                    "max_output_tokens": 8,
                    "store": False,
                }
            ),
            "log-probabilities": Example(_INPUT | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
            "tools": Example(_INPUT | {"tools": [{"type": "function", **_WEATHER}]}),
            "a JSON schema": Example(
                _INPUT | {"text": {"format": {"type": "json_schema", "name": "city", "schema": _CITY}}}
            ),
            "a built-in tool": Example(_INPUT | {"tools": [{"type": "web_search"}]}, status=400),
            "storing": Example(_INPUT | {"store": True}, status=400),
        },
    ),
    *(
        Operation(
            method,
            path,
            "Nothing is stored, so there is no such response",
            {},
            errors=(404,),
            examples={"plain": Example(path=_STORED, status=404)},
        )
        for method, path in (
            ("GET", "/v1/responses/{response_id}"),
            ("DELETE", "/v1/responses/{response_id}"),
            ("GET", "/v1/responses/{response_id}/input_items"),
            ("POST", "/v1/responses/{response_id}/cancel"),
        )
    ),
    Operation(
        "POST",
        "/v1/messages",
        "Answer messages as Anthropic's API does, whole or as a stream of events",
        {200: message_answers.Message},
        requests=(MessagesRequest,),
        event=message_answers.MessageEvent,
        errors=_MESSAGES_FAIL_WITH,
        error=message_answers.MessageError,
        examples={
            "plain": Example(_MESSAGES | {"max_tokens": 8}),
            "stream": Example(_MESSAGES | {"max_tokens": 8, "stream": True}),
            "system": Example(_MESSAGES | {"max_tokens": 8, "system": "Be brief.", "stop_sequences": ["\n\n"]}),
            "tools": Example(_MESSAGES | {"max_tokens": 8, "tools": [{"name": "weather", "input_schema": _CITY}]}),
            "no limit": Example(_MESSAGES, status=400),
        },
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        "Count the tokens of the prompt that messages become",
        {200: message_answers.TokenCount},
        requests=(CountTokensRequest,),
        errors=_MESSAGES_FAIL_WITH,
        error=message_answers.MessageError,
        examples={"plain": Example(_MESSAGES), "no messages": Example({"model": ""}, status=400)},
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
        "/ready",
        "Whether to send requests here: as /health, and 503 as soon as the server was told to stop; it needs no key",
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
        requests=(TokenizeText, TokenizeChat),
        errors=_READING,
        examples={
            "plain": Example({"prompt": "Once upon a time", "return_token_strs": True}),
            "chat": Example({"messages": _QUESTION["messages"], "add_generation_prompt": False}),
            "no text": Example({"prompt": None}, status=400),
        },
    ),
    Operation(
        "POST",
        "/detokenize",
        "Show the text of token ids",
        {200: answers.Text},
        requests=(Detokenize,),
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
