"""Chats with tools are rendered for the families' forms of templates as transformers renders them."""

import json
from datetime import datetime
from typing import Any

import pytest

from actorserve.http.chat.dialect import Dialect
from actorserve.http.chat.template import ChatTemplate
from actorserve.http.openai.chat.prompts import ChatPrompts
from actorserve.http.openai.chat.requests import ChatRequest
from actorserve.http.requests.parsing import RequestParser
from actorserve.settings import HttpSettings
from tests.http.fakes import TOKENIZER

Json = dict[str, Any]

# Short templates that read a chat as those of the families do.
QWEN = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}{{- "\\n</tools><|im_end|>\\n" }}{%- endif %}
{%- for message in messages %}
{%- if message.role == "assistant" %}
{{- '<|im_start|>assistant' }}
{%- if message.reasoning_content is string %}
{{- '\\n<think>\\n' + message.reasoning_content + '\\n</think>\\n' }}
{%- endif %}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}{{- tool_call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == "tool" %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""
LLAMA = """\
{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}{%- endif %}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls | length == 1 %}{{- raise_exception("only single tool-calls at once") }}{%- endif %}
{%- set tool_call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
{{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
{%- else %}
{{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
{%- else %}{{- message.content }}{%- endif %}
{{- "<|eot_id|>" }}
{%- endif %}
{%- endfor %}"""
MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == "user" %}
{%- if tools is not none %}{{- "[AVAILABLE_TOOLS][" }}
{%- for tool in tools %}{%- set tool = tool.function %}{{- '{"type": "function", "function": {' }}
{%- for key, val in tool.items() if key != "return" %}
{%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
{%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}
{%- if not loop.last %}{{- ", " }}{%- endif %}
{%- endfor %}{{- "}}" }}{%- endfor %}{{- "][/AVAILABLE_TOOLS]" }}{%- endif %}
{{- "[INST]" + message.content + "[/INST]" }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}
{{- "[TOOL_CALLS][" }}
{%- for tool_call in message.tool_calls %}
{%- set out = tool_call.function | tojson %}{{- out[:-1] }}
{%- if not tool_call.id is defined or tool_call.id | length != 9 %}
{{- raise_exception("ids have length 9") }}{%- endif %}
{{- ', "id": "' + tool_call.id + '"}' }}
{%- endfor %}{{- "]" + eos_token }}
{%- elif message.role == "assistant" %}{{- message.content + eos_token }}
{%- elif message.role == "tool" %}
{{- '[TOOL_RESULTS]{"content": ' + message.content | string + ', "call_id": "' }}
{{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}"""

TOOL: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'It\'s "fine"',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_ARGUMENTS = {"city": "Zürich", "days": 2, "opts": [True, None]}


def _call(arguments: object) -> Json:
    return {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


CHAT: list[Json] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [_call(json.dumps(_ARGUMENTS))]},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": [{"type": "text", "text": '{"t": 21}'}]},
    {"role": "assistant", "content": "21", "tool_calls": None, "refusal": None},
    {"role": "user", "content": "Thanks"},
]
# The same chat in the form that transformers documents for templates: arguments are objects, and nothing is null.
REFERENCE: list[Json] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [_call(_ARGUMENTS)]},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"t": 21}'},
    {"role": "assistant", "content": "21"},
    {"role": "user", "content": "Thanks"},
]


@pytest.mark.parametrize("tools", [[TOOL], None], ids=["tools", "no tools"])
@pytest.mark.parametrize("source", [QWEN, LLAMA, MISTRAL], ids=["Qwen", "Llama", "Mistral"])
async def test_a_chat_with_tools(source: str, tools: list[Json] | None) -> None:
    """OpenAI's form of calls, results and tools renders as transformers renders its own form of them."""
    chat_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    special: Json = {"bos_token": "<s>", "eos_token": "</s>"}
    arguments: Json = {"enable_thinking": False}
    expected, _ = chat_utils.render_jinja_template(
        [REFERENCE],
        tools=tools,
        chat_template=source,
        add_generation_prompt=True,
        **special,
        **arguments,
    )
    template = ChatTemplate(source, special, timeout_s=30.0, now=lambda: datetime(2024, 7, 26))
    body: Json = {"messages": CHAT, "tools": tools, "chat_template_kwargs": arguments}
    request = RequestParser(HttpSettings(), lambda _: None).validate(ChatRequest, body)
    prompt = await ChatPrompts(template, TOKENIZER, Dialect(source, TOKENIZER)).render(request)
    template.close()
    assert prompt.text == expected[0]
