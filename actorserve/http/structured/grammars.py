"""Grammars for workers (``SamplingParams.grammar``), made from what clients send, and checked."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

from actorserve.core.messages import MAX_GRAMMAR_BYTES
from actorserve.http.structured.checker import GrammarChecker, too_large

_WHITESPACE = r"[ \t\r\n]{1,40}"
"""Between two parts of a JSON text. It is bounded, because some models write line breaks for ever."""


class Grammars:
    """Makes checked grammars. The checks do not run on the event loop.

    ``param`` is the field of the client's request that errors name. Each method raises InvalidRequestError if its
    argument is invalid, not supported, too large, or too costly to compile, and RequestFailedError (429, 503) if it
    cannot be checked now.
    """

    def __init__(self, checker: GrammarChecker) -> None:
        self._checker = checker

    async def from_lark(self, lark: str, param: str, answer: str = "") -> str:
        """The grammar of a text in llguidance's dialect of Lark, checked: a value for ``SamplingParams.grammar``.

        The text has a rule ``start``. ``%json {...}`` stands for any JSON value of a schema. ``<tool_call>`` outside of
        quotes stands for the special token of this name; the name of a token that is not special stands in quotes.
        ``@answer`` stands for what the grammar ``answer`` allows, which another method of this class has made.
        """
        parts: list[dict[str, Any]] = [{"lark_grammar": lark}]
        if answer:
            (inner,) = (await asyncio.to_thread(json.loads, answer))["grammars"]
            parts.append({"name": "answer", **inner})
        return await self._checker.check(await _to_json({"grammars": parts}, param), param)

    async def from_schema(self, schema: Mapping[str, Any], param: str, whitespace: str | None = None) -> str:
        """The grammar of JSON values that the schema allows. The branches of ``oneOf`` must exclude one another by
        their types, constants or required properties, because a grammar cannot count how many branches match.

        ``whitespace``: a regular expression for what may stand between the parts of the text; "" allows nothing there,
        and None at most 40 spaces and line breaks.
        """
        text = await _to_json({"grammars": [{"json_schema": json_schema(schema, whitespace)}]}, param)
        return await self._checker.check(text, param)

    async def from_regex(self, regex: str, param: str) -> str:
        r"""The grammar of texts that match the whole regular expression; ``\d``, ``\w`` and ``\s`` mean ASCII."""
        _check_chars(len(regex), param)
        return await self.from_lark(f"start: /{regex_to_lark(regex, 'dws')}/", param)

    async def from_choices(self, choices: Sequence[str], param: str) -> str:
        """The grammar of exactly these texts."""
        _check_chars(sum(map(len, choices)) + 3 * len(choices), param)
        return await self.from_lark(f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, choices))}", param)

    async def from_ebnf(self, text: str, param: str) -> str:
        """The grammar of a text in Lark, or in llama.cpp's GBNF (with ``::=``)."""
        return await self._checker.check(text, param, "ebnf")


def json_schema(schema: Mapping[str, Any], whitespace: str | None = None) -> dict[str, Any]:
    """The schema as llguidance reads it, also behind ``%json`` in Lark; ``whitespace`` as in ``from_schema``."""
    options: dict[str, Any] = {}
    if whitespace == "":
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = whitespace or _WHITESPACE
    return {**schema, "x-guidance": options}


async def _to_json(grammar: Mapping[str, Any], param: str) -> str:
    """JSON text, made in another thread and only up to the limit, so that a huge schema costs little."""

    def make() -> str:
        parts: list[str] = []
        num_chars = 0
        for part in json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).iterencode(grammar):
            parts.append(part)
            num_chars += len(part)
            _check_chars(num_chars, param)
        return "".join(parts)

    return await asyncio.to_thread(make)


def _check_chars(num_chars: int, param: str) -> None:
    if num_chars > MAX_GRAMMAR_BYTES:
        raise too_large(param)
