"""How the served model writes thoughts and tool calls, found out from its chat template."""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from actorserve.errors import InvalidRequestError
from actorserve.http.chat import reasoning
from actorserve.http.chat.deltas import OutputParser, PlainText
from actorserve.http.chat.reasoning import Thoughts
from actorserve.http.chat.tools.call_form import CallForm, Functions
from actorserve.http.chat.tools.first_call import FirstCall
from actorserve.http.chat.tools.grammar import calls_grammar, text_grammar, thoughts_grammar
from actorserve.http.chat.tools.hermes import HERMES
from actorserve.http.chat.tools.llama3 import LLAMA3
from actorserve.http.chat.tools.mistral import MISTRAL_LIST, MISTRAL_NAMED
from actorserve.http.chat.tools.prompt import with_tools_as_text
from actorserve.http.chat.tools.qwen3_coder import QWEN3_CODER
from actorserve.model_files.tokenizer import Tokenizer

ToolParserName = Literal["auto", "hermes", "qwen3_coder", "llama3", "mistral", "none"]
ReasoningParserName = Literal["auto", "think", "none"]

_TAIL_TOKENS = 16
"""Enough for the marker of thoughts in any vocabulary, with white space behind it."""


class Dialect:
    """The served model's forms of thoughts and tool calls. All chats share it."""

    def __init__(
        self,
        template: str | None,
        tokenizer: Tokenizer,
        tool_parser: ToolParserName = "auto",
        reasoning_parser: ReasoningParserName = "auto",
    ) -> None:
        """``template`` is the chat template's source, which decides ``auto``; None if the model has no template."""
        source = template or ""
        self.call_form = _call_form(source, tool_parser)
        """None: calls are not looked for."""
        self.thinks = reasoning_parser == "think" or (reasoning_parser == "auto" and reasoning.END in source)
        self._knows_tools = re.search(r"\btools\b", source) is not None
        self._tokenizer = tokenizer

    def prepare(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]]
    ) -> tuple[Sequence[Mapping[str, object]], Mapping[str, object]]:
        """The messages and the arguments with which to render the template for a chat with ``tools``.

        If the template knows no tools, they become text in the messages.
        """
        if self._knows_tools:
            return messages, {"tools": tools} if tools else {}
        return with_tools_as_text(messages, tools, self.call_form or HERMES), {}

    def check(self, functions: Functions) -> None:
        """Raises: InvalidRequestError if the model's calls of ``functions`` could not be found in its text."""
        if functions and self.call_form is None:
            message = "tools: this server does not look for the model's tool calls (model.tool_parser is none)"
            raise InvalidRequestError(message, "tools")

    def parser(self, prompt: Sequence[int], functions: Functions, *, parallel: bool = True) -> OutputParser:
        """A parser for one choice of the answer to ``prompt``, given as token ids.

        Without ``functions`` it does not look for calls. Without ``parallel`` it gives one call at most.
        """
        parser: OutputParser = PlainText()
        if self.call_form is not None and functions:
            reader = self.call_form.new_reader(functions)
            parser = reader if parallel else FirstCall(reader)
        return Thoughts(parser, begun=self._begins_in_thoughts(prompt)) if self.thinks else parser

    def marker_ids(self, *, with_tools: bool) -> frozenset[int]:
        """The special tokens whose text the parser must see, because they mark thoughts or calls."""
        markers = [reasoning.BEGIN, reasoning.END] if self.thinks else []
        if self.call_form is not None and with_tools:
            markers += self.call_form.markers
        return frozenset(token_id for marker in markers if (token_id := self._special_id(marker)) is not None)

    def grammar(self, prompt: Sequence[int], functions: Functions, *, parallel: bool, or_answer: bool) -> str:
        """The grammar, as llguidance's Lark, that makes the model call ``functions``, after it has thought.

        With ``or_answer`` the model may follow the grammar ``@answer`` instead; without functions it must follow
        ``@answer``. There must be a ``call_form`` if there are functions.
        """
        rules: list[str] = []
        wanted = ["@answer"] if or_answer else []
        if functions:
            assert self.call_form is not None
            rules.append(calls_grammar(functions, self.call_form, self._special_id, parallel=parallel))
            wanted.append("calls")
        return self._behind_thoughts(prompt, f"({' | '.join(wanted)})", rules)

    def text_grammar(self, prompt: Sequence[int], functions: Functions) -> str | None:
        """The grammar of any answer in which the calls are of ``functions``, and follow their schemas.

        None if the model's form of calls has no trigger, so that no grammar can tell where one begins.
        """
        if self.call_form is None or not self.call_form.trigger:
            return None
        rules = text_grammar(functions, self.call_form, self._special_id)
        return self._behind_thoughts(prompt, "text", [rules])

    def _behind_thoughts(self, prompt: Sequence[int], start: str, rules: list[str]) -> str:
        """The grammar that begins with ``start``, or with thoughts before it if the model thinks."""
        if self.thinks:
            begun = self._begins_in_thoughts(prompt)
            rules.append(thoughts_grammar(self._special_id, begun=begun))
            start = f"thoughts {start}" if begun else f"thoughts? {start}"
        return "\n".join([f"start: {start}", *rules])

    def _begins_in_thoughts(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt already opens the thoughts, so that the model writes no marker before them."""
        tail = self._tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False)
        return tail.rstrip().endswith(reasoning.BEGIN)

    def _special_id(self, text: str) -> int | None:
        token_id = self._tokenizer.token_id(text)
        return token_id if token_id in self._tokenizer.special_token_ids else None


def _call_form(source: str, name: ToolParserName) -> CallForm | None:
    mistral = MISTRAL_NAMED if "[ARGS]" in source else MISTRAL_LIST
    match name:
        case "none":
            return None
        case "qwen3_coder":
            return QWEN3_CODER
        case "llama3":
            return LLAMA3
        case "mistral":
            return mistral
        case "auto" if "[TOOL_CALLS]" in source:
            return mistral
        case "auto" if "<function=" in source:
            return QWEN3_CODER
        case "auto" if "<tool_call>" not in source and ("<|python_tag|>" in source or "Environment: ipython" in source):
            return LLAMA3
        case _:
            return HERMES
