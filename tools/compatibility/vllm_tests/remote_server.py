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
_MODEL_TOKENS: Final = 8192  # the default model's longest context; most tests that want more do not fill it

Section = dict[str, str | int | list[str]]


def _set(section: str, name: str, kind: Callable[[str], str | int | list[str]] = str) -> tuple[str, str, Any]:
    return section, name, kind


def _context_tokens(value: str) -> int:
    return min(int(value), _MODEL_TOKENS)


SETTINGS: Final[Mapping[str, tuple[str, str, Callable[[str], str | int | list[str]]]]] = {
    "--max-model-len": _set("workers", "max_context_tokens", _context_tokens),
    "--max-logprobs": _set("http", "max_top_logprobs", int),
    "--served-model-name": _set("model", "name"),
}
"""vLLM's options that are settings of ours."""

IGNORED: Final = {
    "--attention-backend": 1,
    "--dtype": 1,
    "--enable-auto-tool-choice": 0,
    "--enable-chunked-prefill": 0,
    "--enable-lora": 0,
    "--enable-prefix-caching": 0,
    "--enable-prompt-tokens-details": 0,
    "--enforce-eager": 0,
    "--gpu-memory-utilization": 1,
    "--lora-modules": 1,
    "--max-cpu-loras": 1,
    "--max-lora-rank": 1,
    "--max-num-batched-tokens": 1,
    "--max-num-seqs": 1,
    "--no-async-scheduling": 0,
    "--no-enable-prefix-caching": 0,
    "--reasoning-parser": 1,
    "--seed": 1,
    "--structured-outputs-config.backend": 1,
    "--tokenizer": 1,
    "--tool-call-parser": 1,
    "--trust-remote-code": 0,
}
"""vLLM's options that change no answer of our server, or that it chooses itself, and the number of their values."""


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
    """Our settings for vLLM's options. A test whose server has an option without a counterpart is skipped."""
    settings: dict[str, Section] = {"model": {"name": model}}
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
    return settings
