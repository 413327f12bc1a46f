"""A model that thinks and calls tools, served by the app, and official SDKs that call the app without a network."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace

import httpx2
from starlette.types import ASGIApp

from actorserve.core.effects import Deliver, End
from actorserve.core.messages import FinishReason, ModelInfo, RequestSpec
from actorserve.http.access.api_keys import ApiKeys
from actorserve.http.app import create_app
from actorserve.http.chat.template import ChatTemplate
from actorserve.settings import HttpSettings
from tests.http.fakes import DESCRIPTION, MODEL, TOKENIZER, VOCAB_SIZE, ScriptedService, one_by_one

THINKING_TEMPLATE = (
    "{% for tool in tools or [] %}<|tool|>{{ tool.function.name }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Like those of Qwen: it makes the app look for thoughts and for calls in the form of Hermes."""
AGENT_CONTEXT_TOKENS = 20_000
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def call(name: str, **arguments: object) -> str:
    """A tool call as the model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def thinks_and_calls(text: str, reason: FinishReason = FinishReason.STOP) -> ScriptedService:
    """A service whose every answer is ``text``, with room for the prompts of agents."""
    return agent_service(lambda _: one_by_one(text, reason))


def agent_service(script: Callable[[RequestSpec], Iterable[Deliver | End]] | None = None) -> ScriptedService:
    service = ScriptedService(script)
    service.model = ModelInfo(MODEL, VOCAB_SIZE, AGENT_CONTEXT_TOKENS)
    return service


def agent_app(
    service: ScriptedService, settings: HttpSettings | None = None, api_keys: ApiKeys | None = None
) -> ASGIApp:
    settings = settings or HttpSettings()
    template = ChatTemplate(THINKING_TEMPLATE, {}, timeout_s=settings.template_timeout_s)
    description = replace(DESCRIPTION, chat_template=THINKING_TEMPLATE)
    return create_app(service, TOKENIZER, template, description, settings, api_keys=api_keys)


def sdk_client(
    service: ScriptedService, settings: HttpSettings | None = None, api_keys: ApiKeys | None = None
) -> httpx2.AsyncClient:
    """The HTTP client to give to an SDK."""
    transport = httpx2.ASGITransport(agent_app(service, settings, api_keys), raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url="http://localhost")


def prompt_of(service: ScriptedService, index: int = -1) -> str:
    """The text of a request's prompt."""
    return TOKENIZER.decode(service.specs[index].prompt_token_ids, skip_special_tokens=False)
