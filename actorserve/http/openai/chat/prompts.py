"""From a chat's request to its prompt: the template's text, and the tokenizer that reads it."""

import asyncio
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from actorserve.errors import InvalidRequestError
from actorserve.http.chat.control_tokens import ControlTokens
from actorserve.http.chat.dialect import Dialect
from actorserve.http.chat.template import ChatTemplate
from actorserve.http.openai.chat.requests import ChatRequest
from actorserve.model_files.tokenizer import Tokenizer

_END = "".join(chr(0xE000 + secrets.randbelow(0x1900)) for _ in range(4))
"""Shows in a rendered text where the message that the model shall continue ends."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt's text, and how to encode it. Its tokens begin with ``_first_ids``."""

    text: str
    _tokenizer: Tokenizer
    _encoded_text: str
    _first_ids: list[int]

    def encode_in_parts(self) -> Iterator[list[int]]:
        """The prompt's token ids, in several lists if it is long. It blocks."""
        yield self._first_ids
        yield from self._tokenizer.encode_in_parts(self._encoded_text, add_special_tokens=False)


class ChatPrompts:
    """Renders chats. No text of a client becomes a control token."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, dialect: Dialect) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._dialect = dialect
        self._aliased, aliases = tokenizer.with_control_aliases()
        self._controls = ControlTokens(aliases)
        self._special_ids = tokenizer.encode("")  # with which the tokenizer begins every text

    async def render(self, request: ChatRequest) -> ChatPrompt:
        """Raises: InvalidRequestError if the template refuses the chat, or takes too long."""
        if request.documents and "documents" not in self._template.variables:
            raise InvalidRequestError("documents: the model's chat template does not use documents", "documents")
        context, is_marked = await asyncio.to_thread(self._context, request)
        text = await self._render(request, context)
        first_ids = self._special_ids if request.add_special_tokens else []
        if not is_marked:
            return ChatPrompt(text, self._tokenizer, text, first_ids)
        return await asyncio.to_thread(self._unmarked, text, first_ids)

    def _unmarked(self, text: str, first_ids: list[int]) -> ChatPrompt:
        plain, aliased = self._controls.without_markers(text), self._controls.with_aliases(text)
        return ChatPrompt(plain, self._aliased, aliased, first_ids)

    def _context(self, request: ChatRequest) -> tuple[dict[str, Any], bool]:
        """The variables of the template that come from the client, and whether there are markers in them."""
        tools = [tool.for_template() for tool in request.tools]
        messages, arguments = self._dialect.prepare([message.for_template() for message in request.messages], tools)
        context: dict[str, Any] = {**_template_arguments(request), **arguments, "messages": list(messages)}
        marked = self._controls.mark(context)
        return (context, False) if marked is None else (marked, True)

    async def _render(self, request: ChatRequest, context: dict[str, Any]) -> str:
        messages: list[Mapping[str, Any]] = context.pop("messages")
        if request.continue_final_message:
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + _END}
        text = await self._template.render(
            messages, add_generation_prompt=request.add_generation_prompt, arguments=context
        )
        if not request.continue_final_message:
            return text
        prompt, found, _ = text.rpartition(_END)
        if not found:
            message = "continue_final_message: the model's chat template leaves out the last message"
            raise InvalidRequestError(message, "continue_final_message")
        return prompt


def _template_arguments(request: ChatRequest) -> dict[str, Any]:
    arguments: dict[str, Any] = {"tools": None}  # as in transformers, where a template may ask whether it is None
    if request.reasoning_effort is not None:
        arguments["reasoning_effort"] = request.reasoning_effort
    if request.verbosity is not None:
        arguments["verbosity"] = request.verbosity
    if request.documents:
        arguments["documents"] = list(request.documents)
    return arguments | request.chat_template_kwargs
