"""What the tests call ``RemoteOpenAIServer``, with our server behind it."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self
from urllib.parse import urlsplit

import anthropic
import openai
import pytest

from tools.compatibility.server import running_server

_TIMEOUT_S: Final = 600.0
_CONTEXT_TOKENS: Final = 2048  # of most servers, so that a small model's endless answer ends soon
_LONG_CONTEXT_TOKENS: Final = 8192  # the default model's longest

Section = dict[str, str | int | list[str]]


def _set(section: str, name: str, kind: Callable[[str], str | int | list[str]] = str) -> tuple[str, str, Any]:
    return section, name, kind


def _tool_parser(value: str) -> str:
    if value not in _TOOL_PARSERS:
        pytest.skip(f"the form in which another family of models calls tools: {value}")
    return _TOOL_PARSERS[value]


_TOOL_PARSERS: Final = {"hermes": "hermes", "llama3_json": "llama3", "mistral": "mistral"}

SETTINGS: Final[Mapping[str, tuple[str, str, Callable[[str], str | int | list[str]]]]] = {
    "--chat-template": _set("model", "chat_template"),
    "--max-model-len": _set("workers", "max_context_tokens", int),
    "--max-logprobs": _set("http", "max_top_logprobs", int),
    "--served-model-name": _set("model", "aliases", lambda name: [name]),
    # The only server with this option is asked for hundreds of answers, whose text does not matter.
    "--runner": _set("workers", "engine", lambda _: "fake"),
    "--tool-call-parser": _set("model", "tool_parser", _tool_parser),
}
"""vLLM's options that are settings of ours."""

IGNORED: Final = {
    "--attention-backend": 1,
    "--config-format": 1,
    "--dtype": 1,
    "--enable-auto-tool-choice": 0,
    "--enable-chunked-prefill": 0,
    "--enable-lora": 0,
    "--enable-per-request-metrics": 0,
    "--enable-prefix-caching": 0,
    "--enable-prompt-tokens-details": 0,
    "--enforce-eager": 0,
    "--enable-tokenizer-info-endpoint": 0,
    "--gpu-memory-utilization": 1,
    "--ignore-patterns": 1,
    "--limit-mm-per-prompt": 1,
    "--load-format": 1,
    "--lora-modules": 1,
    "--max-cpu-loras": 1,
    "--max-lora-rank": 1,
    "--max-num-batched-tokens": 1,
    "--max-num-seqs": 1,
    "--no-async-scheduling": 0,
    "--no-enable-prefix-caching": 0,
    "--reasoning-config": 1,
    "--reasoning-parser": 1,
    "--seed": 1,
    "--structured-outputs-config.backend": 1,
    "--tokenizer": 1,
    "--tokenizer-mode": 1,
    "--trust-remote-code": 0,
}
"""vLLM's options that change no answer of our server, or only answers to tests that are skipped by name, or that our
server chooses itself; and the number of their values.
"""

LONG_CONTEXT: Final = {"--enable-chunked-prefill", "--enable-tokenizer-info-endpoint"}
"""Options of servers whose tests need a long context."""


class RemoteOpenAIServer:
    """Starts our server with the default model under the name of the model that a test asks for."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str, vllm_serve_args: Sequence[str], **_: object) -> None:
        """Other arguments, such as the seed and how long to wait, have no meaning for our server."""
        settings = settings_of(model, vllm_serve_args)
        self._exit = contextlib.ExitStack()
        server = self._exit.enter_context(running_server(settings=settings, python=os.environ["ACTORSERVE_PYTHON"]))
        self.url_root = server.url
        self.host = urlsplit(server.url).hostname
        self.port = urlsplit(server.url).port

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def url_for(self, *parts: str) -> str:
        return f"{self.url_root}/{'/'.join(part.strip('/') for part in parts if part)}"

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._options(self.url_for("v1")) | options)

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._options(self.url_for("v1")) | options)

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(**self._options(self.url_root) | options)

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**self._options(self.url_root) | options)

    def _options(self, url: str) -> dict[str, Any]:
        return {"base_url": url, "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": _TIMEOUT_S}


def settings_of(model: str, options: Sequence[str]) -> dict[str, Section]:
    """Our settings for vLLM's options. A test whose server has an option without a counterpart is skipped.

    The model's name is an alias, because the name itself is that of the measured times of iterations, which would be
    measured for every name.
    """
    most = _LONG_CONTEXT_TOKENS if LONG_CONTEXT.intersection(options) else _CONTEXT_TOKENS
    settings: dict[str, Section] = {"model": {"aliases": [model]}, "workers": {"max_context_tokens": most}}
    rest = list(options)
    while rest:
        name, is_joined, value = str(rest.pop(0)).replace("_", "-").partition("=")
        if name in SETTINGS:
            section, setting, kind = SETTINGS[name]
            settings.setdefault(section, {})[setting] = kind(value if is_joined else str(rest.pop(0)))
        elif name in IGNORED:
            if not is_joined:
                del rest[: IGNORED[name]]
        else:
            pytest.skip(f"needs vLLM's option {name}")
    settings["workers"]["max_context_tokens"] = min(most, int(str(settings["workers"]["max_context_tokens"])))
    return settings
