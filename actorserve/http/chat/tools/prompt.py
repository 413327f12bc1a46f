"""Tools for models whose chat template knows none: they are described and written in the text of plain messages."""

import json
from collections.abc import Mapping, Sequence

from actorserve.http.chat.tools.call_form import CallForm

Message = Mapping[str, object]

_PROMPT = """\
You can call functions. These are the functions, each with a JSON schema of its arguments:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments like this:
{example}
The results of your calls come in the next message, between <tool_response> and </tool_response>. Call functions only \
if you need them, and never make up their results."""


def with_tools_as_text(
    messages: Sequence[Message], tools: Sequence[Mapping[str, object]], form: CallForm
) -> list[Message]:
    """The messages without anything of tools but text.

    The system's message describes ``tools``, calls stand in the assistant's text, and the user gives their results.
    """
    plain: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            _add_result(plain, message)
        elif message.get("tool_calls"):
            plain.append(_with_calls(message, form))
        else:
            plain.append(message)
    return _with_description(plain, tools, form) if tools else plain


def _with_description(messages: list[Message], tools: Sequence[Mapping[str, object]], form: CallForm) -> list[Message]:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _PROMPT.format(tools=listed, example=form.write([("NAME", '{"ARGUMENT": "VALUE"}')]))
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _with_calls(message: Message, form: CallForm) -> Message:
    calls = message["tool_calls"]
    assert isinstance(calls, Sequence)
    text = form.write([_name_and_arguments(call["function"]) for call in calls])
    content = message.get("content")
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**plain, "content": f"{content}\n{text}" if content else text}


def _name_and_arguments(function: Mapping[str, object]) -> tuple[str, str]:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return str(function["name"]), text


def _add_result(messages: list[Message], message: Message) -> None:
    """Add a tool's result. Results in a row become one message, because many templates want the roles to alternate."""
    text = f"<tool_response>\n{message['content']}\n</tool_response>"
    last = messages[-1] if messages else {}
    if last.get("role") == "user" and str(last["content"]).endswith("</tool_response>"):
        messages[-1] = {**last, "content": f"{last['content']}\n{text}"}
    else:
        messages.append({"role": "user", "content": text})
