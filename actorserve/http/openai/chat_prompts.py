"""From a chat's request to its prompt: the template's text, and the tokenizer that reads it."""

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actorserve.errors import InvalidRequestError
from actorserve.http.chat.control_tokens import ControlTokens
from actorserve.http.chat.template import ChatTemplate
from actorserve.http.openai.requests import ChatRequest
from actorserve.model_files.tokenizer import Tokenizer

_END = "".join(chr(0xE000 + secrets.randbelow(0x1900)) for _ in range(4))
"""Shows in a rendered text where the message that the model shall continue ends."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt's text, to be encoded by this tokenizer without further special tokens."""

    text: str
    tokenizer: Tokenizer

    def encode(self) -> tuple[int, ...]:
        """The prompt's token ids. It blocks."""
        return tuple(self.tokenizer.encode(self.text, add_special_tokens=False))


class ChatPrompts:
    """Renders chats. No text of a client becomes a control token."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._aliased, aliases = tokenizer.with_control_aliases()
        self._controls = ControlTokens(aliases)

    async def render(self, request: ChatRequest) -> ChatPrompt:
        """Raises: InvalidRequestError if the template refuses the chat, or takes too long."""
        if request.documents and "documents" not in self._template.variables:
            raise InvalidRequestError("documents: the model's chat template does not use documents", "documents")
        context = await asyncio.to_thread(_context, request)
        marked = await asyncio.to_thread(self._controls.mark, context)
        text = await self._render(request, context if marked is None else marked)
        if marked is None:
            return ChatPrompt(text, self._tokenizer)
        return ChatPrompt(self._controls.unmark(text), self._aliased)

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


def _context(request: ChatRequest) -> dict[str, Any]:
    """The variables of the template that come from the client."""
    context: dict[str, Any] = dict(request.chat_template_kwargs)
    for name in ("reasoning_effort", "verbosity"):
        if getattr(request, name) is not None:
            context.setdefault(name, getattr(request, name))
    if request.documents:
        context["documents"] = list(request.documents)
    context["tools"] = [tool.for_template() for tool in request.tools] or None
    context["messages"] = [message.for_template() for message in request.messages]
    return context
