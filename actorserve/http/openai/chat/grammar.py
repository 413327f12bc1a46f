"""The grammar of the answer to a chat: of its tool calls, and of the format that the client wants."""

import asyncio
from collections.abc import Sequence

from actorserve.http.chat.dialect import Dialect
from actorserve.http.openai.chat.requests import ChatRequest
from actorserve.http.openai.chat.tool_use import callable_functions, must_call, several_calls
from actorserve.http.openai.response_format import grammar_of
from actorserve.http.structured.grammars import Grammars


async def chat_grammar(request: ChatRequest, prompt: Sequence[int], dialect: Dialect, grammars: Grammars) -> str:
    """The grammar that the answer to ``prompt``, given as token ids, must follow; "" for any text.

    A model that thinks may think before. If the answer may be a call, the wanted format applies to answers that are
    none, as in OpenAI's API; and if it must be a call, the format has nothing to apply to. Calls that are not demanded
    follow the schemas of functions that are ``strict``, if the model's form of calls allows that.

    Raises: InvalidRequestError, RequestFailedError as ``Grammars`` does.
    """
    functions = callable_functions(request)
    answer = "" if must_call(request) else await grammar_of(request, grammars)
    if not answer and not must_call(request):
        return await _strict_calls(request, prompt, dialect, grammars)
    if not functions and not dialect.thinks:
        return answer
    lark = await asyncio.to_thread(
        dialect.grammar, prompt, functions, parallel=several_calls(request), or_answer=bool(answer)
    )
    return await grammars.from_lark(lark, "tools" if functions else "response_format", answer)


async def _strict_calls(request: ChatRequest, prompt: Sequence[int], dialect: Dialect, grammars: Grammars) -> str:
    """The grammar of a text that may have calls, if a function is strict. The others' arguments are any objects."""
    strict = {tool.name for tool in request.tools if tool.strict}
    functions = callable_functions(request)
    if not strict.intersection(functions):
        return ""
    schemas = {name: schema if name in strict else {"type": "object"} for name, schema in functions.items()}
    lark = await asyncio.to_thread(dialect.text_grammar, prompt, schemas)
    return "" if lark is None else await grammars.from_lark(lark, "tools")
