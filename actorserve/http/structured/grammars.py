"""Grammars for workers (``SamplingParams.grammar``), made from what clients send, and checked."""

import json
from typing import Protocol


class Checker(Protocol):
    """Checks that a grammar can be used with the served model's vocabulary."""

    async def check(self, grammar: str, param: str) -> None:
        """Return if the grammar is valid, within the limits on size, time and memory.

        Raises: InvalidRequestError that names ``param`` if it is not; RequestFailedError if it cannot be checked now.
        """
        ...


class Grammars:
    """Makes checked grammars. The checks do not run on the event loop."""

    def __init__(self, checker: Checker) -> None:
        self._checker = checker

    async def from_lark(self, lark: str, param: str) -> str:
        """The grammar of a text in llguidance's dialect of Lark, checked: a value for ``SamplingParams.grammar``.

        The text has a rule ``start``. ``%json {...}`` stands for any JSON value of a schema. ``<tool_call>`` outside of
        quotes stands for the special token of this name; the name of a token that is not special stands in quotes.
        ``param`` is the field of the client's request that errors name.

        Raises: InvalidRequestError if the text is invalid, too large, or too costly; RequestFailedError (429, 503) if
        it cannot be checked now.
        """
        grammar = json.dumps({"grammars": [{"lark_grammar": lark}]}, ensure_ascii=False)
        await self._checker.check(grammar, param)
        return grammar
