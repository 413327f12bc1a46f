"""HTTP: bytes that are almost a request, and requests whose JSON is almost right, with and without streams."""

import http.client
import json
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from tools.fuzzing.errors import BrokenServerError
from tools.fuzzing.mutations import mutated, random_bytes
from tools.fuzzing.targets.streams import StreamTarget
from tools.fuzzing.targets.target import Place, Recent

_TIMEOUT_S: Final = 60.0
_MAX_READ: Final = 2048
_MAX_BODY: Final = 200_000
_EXPECTED_5XX: Final = (501, 503, 504)
_SAMPLING: Final[dict[str, Any]] = {
    "max_tokens": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "n": 2, "stop": ["a", "b"],
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": True,
    "logit_bias": {"5": 1.0}, "stop_token_ids": [2], "priority": 0, "cache_salt": "s", "user": "u", "stream": False,
    "stream_options": {"include_usage": True}, "return_token_ids": True,
}  # fmt: skip
_USER: Final = {"role": "user", "content": "hi"}
_MESSAGES: Final = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
]
_OBJECT: Final = {"type": "object", "properties": {"a": {"enum": [1, "b"]}, "b": {"type": "integer"}}}
_TOOL: Final = {"type": "function", "function": {"name": "f", "parameters": _OBJECT}}
_SCHEMA: Final = {"type": "json_schema", "json_schema": {"name": "s", "schema": _OBJECT}}
_CLAUDE_TOOL: Final = {"name": "f", "input_schema": {"type": "object"}}
_BODIES: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("/v1/completions", {"prompt": "Once", **_SAMPLING, "logprobs": 2, "echo": True, "prompt_logprobs": 1}),
    ("/v1/completions", {"prompt": [[1, 2, 3], [4]], **_SAMPLING, "stream": True}),
    ("/v1/chat/completions", {"messages": _MESSAGES, **_SAMPLING, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": _MESSAGES, **_SAMPLING, "stream": True, "tools": [_TOOL]}),
    ("/v1/chat/completions", {"messages": _MESSAGES, "max_completion_tokens": 4, "response_format": _SCHEMA}),
    ("/v1/responses", {"input": [_USER], "max_output_tokens": 4, "stream": True, "instructions": "x"}),
    ("/v1/messages", {"messages": [_USER], "max_tokens": 3, "system": "s", "stream": True, "tools": [_CLAUDE_TOOL]}),
    ("/v1/messages/count_tokens", {"messages": [_USER]}),
    ("/tokenize", {"prompt": "hi", "add_special_tokens": True}),
    ("/tokenize", {"messages": _MESSAGES, "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
)
_PATHS: Final = (
    *("/health", "/ready", "/ping", "/metrics", "/version", "/v1/models", "/v1/models/x", "/openapi.json", "/nothing"),
    *(
        "/health_generate",
        "/v1/responses/x",
        "/v1/responses/x/input_items",
        "/%00",
        "//",
        "/v1/models/" + "%2e%2e/" * 50,
    ),
)
_ODD: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, -1e308, 1e-320, "", "\x00", "\ud800", "x" * 3000),
    *([], [[]], [None], {}, {"type": "x"}, [1] * 2000, {"a": {"b": {"c": []}}}, "é\u202e<|im_end|>", "auto", "stop"),
)


class RawHttpTarget(StreamTarget):
    """Bytes, each on a connection of its own."""

    def __init__(self, place: Place) -> None:
        super().__init__("HTTP, bytes", [place])

    def data(self, dice: random.Random) -> bytes:
        path, body = dice.choice(_BODIES)
        content = json.dumps({"model": "m", **body}).encode()
        post = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n"
        head = f"{post}content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        chunked = f"{post}transfer-encoding: chunked\r\n\r\n{len(content):x}\r\n"
        long_id = "a" * dice.choice((1, 9000))
        get = f"GET {dice.choice(_PATHS)} HTTP/1.1\r\nhost: localhost\r\nx-request-id: {long_id}\r\n\r\n"
        match dice.randrange(7):
            case 0:
                return random_bytes(dice)
            case 1:
                return mutated(get.encode(), dice)
            case 2:
                return get.encode() * dice.choice((1, 2, 40))
            case 3:
                return mutated(head.encode(), dice) + content
            case 4:
                return head.encode() + mutated(content, dice)[: len(content)]
            case 5:
                return mutated(chunked.encode() + content + b"\r\n0\r\n\r\n", dice)
            case _:
                return (head.encode() + content)[: dice.randrange(len(head) + len(content))]


class JsonTarget:
    """Requests that HTTP allows. Each must get an answer, and none an internal error.

    ``host``, ``port``, ``model``: the server's.
    """

    def __init__(self, host: str, port: int, model: str) -> None:
        self.name = "HTTP, JSON"
        self._host, self._port, self._model = host, port, model
        self._connection: http.client.HTTPConnection | None = None

    def send(self, dice: random.Random, count: int, recent: Recent) -> None:
        """Raises: BrokenServerError for an internal error, or if no answer comes."""
        for _ in range(count):
            if dice.random() < 0.1:
                method, path, content = (
                    dice.choice(("GET", "DELETE", "OPTIONS", "PUT", "HEAD")),
                    dice.choice(_PATHS),
                    b"",
                )
            else:
                path, body = dice.choice(_BODIES)
                method, content = "POST", self._content(body, dice)
            recent.add(self.name, f"{method} {path} ".encode() + content[:4096])
            self._ask(method, path, content, dice)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _content(self, body: dict[str, Any], dice: random.Random) -> bytes:
        changed = json.loads(json.dumps({"model": self._model, **body}))
        for _ in range(dice.randint(0, 3)):
            _change(changed, dice)
        try:
            content = json.dumps(changed).encode()
        except (ValueError, RecursionError):  # such as an integer of too many digits
            return b"{" * 5000
        return (mutated(content, dice) if dice.random() < 0.1 else content)[:_MAX_BODY]

    def _ask(self, method: str, path: str, content: bytes, dice: random.Random) -> None:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            self._connection.request(method, path, content, {"content-type": "application/json"})
            answer = self._connection.getresponse()
            status, read = answer.status, answer.read(_MAX_READ)
            if not answer.isclosed() or dice.random() < 0.05:
                self.close()  # in the middle of an answer
        except TimeoutError:
            raise BrokenServerError(f"{method} {path} has had no answer for {_TIMEOUT_S:.0f} s") from None
        except (ConnectionError, http.client.HTTPException):
            self.close()  # the server may close a connection; a server that does not answer at all is found below
            self._reconnect()
            return
        if status >= 500 and status not in _EXPECTED_5XX:
            raise BrokenServerError(f"{method} {path} gets {status}: {read[:300]!r}")

    def _reconnect(self) -> None:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            connection.connect()
        except OSError as error:
            raise BrokenServerError(f"HTTP accepts no connection: {error}") from None
        self._connection = connection


def _change(value: Any, dice: random.Random) -> None:
    """Change one thing in a JSON value, at any depth."""
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not keys:
        return
    key = dice.choice(keys)
    if isinstance(value[key], dict | list) and dice.random() < 0.6:
        _change(value[key], dice)
        return
    changes: tuple[Callable[[], Any], ...] = (
        lambda: value.pop(key),
        lambda: value.__setitem__(key, dice.choice(_ODD)),
        lambda: value.__setitem__(key, [value[key]] * dice.choice((1, 3, 200))),
        lambda: value.__setitem__(key, {"x": value[key]}),
    )
    with suppress(RecursionError):
        dice.choice(changes)()
