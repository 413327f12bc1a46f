"""The grammar of tool calls that a request demands, in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Callable, Mapping

from actorserve.http.chat.reasoning import BEGIN, END
from actorserve.http.chat.tools.call_form import CallForm, Functions
from actorserve.http.structured.grammars import json_schema

_SPACE = " "
"""What may stand between two parts of the arguments, once. A small model that may write more white space spends its
tokens on it, and is cut off before the call is complete."""

_SAYS_MORE = frozenset({"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"})

TokenId = Callable[[str], int | None]
"""The id of a special token by its text; None for text that is not a special token."""


def calls_grammar(functions: Functions, form: CallForm, token_id: TokenId, *, parallel: bool) -> str:
    """Rules for ``calls``: one call, or with ``parallel`` any number, of these functions."""

    def text(value: str) -> str:
        return literal(value, form.markers, token_id)

    more = f"({text(form.separator)} call)*" if parallel else ""
    rules = [
        f"calls: {text(form.opening)} call {more} {text(form.closing)}",
        f"call: {' | '.join(f'call_{index}' for index in range(len(functions)))}",
    ]
    for index, (name, parameters) in enumerate(functions.items()):
        begin, end = text(f"{form.before_name}{name}{form.before_arguments}"), text(form.after_arguments)
        rules.append(f"call_{index}: {begin} arguments_{index} {end}")
        rules.append(f"arguments_{index}: %json {json.dumps(json_schema(_object_schema(parameters), _SPACE))}")
    return "\n".join(rules)


def thoughts_grammar(token_id: TokenId, *, begun: bool) -> str:
    """Rules for ``thoughts``, with white space behind them. With ``begun`` their beginning is in the prompt."""
    begin, end = (literal(marker, (BEGIN, END), token_id) for marker in (BEGIN, END))
    # A special token ends the text before it. Ordinary text must end itself, at the first place where it can.
    is_special = token_id(END) is not None
    inside = rf"/(.|\n)*/ {end}" if is_special else "unended"
    rules = [f"thoughts: {'' if begun else begin} {inside} /[ \\n]{{0,40}}/"]
    if not is_special:
        rules.append(rf"unended[lazy]: /(.|\n)*{re.escape(END).replace('/', chr(92) + '/')}/")
    return "\n".join(rules)


def literal(text: str, markers: tuple[str, ...], token_id: TokenId) -> str:
    """Exactly this text. Markers that are special tokens stand as tokens, because no other token spells them."""
    parts = re.split("(" + "|".join(map(re.escape, markers)) + ")", text)
    written: list[str] = []
    for part in filter(None, parts):
        special = token_id(part) if part in markers else None
        written.append(json.dumps(part) if special is None else f"<[{special}]>")
    return " ".join(written)


def _object_schema(parameters: Mapping[str, object] | None) -> Mapping[str, object]:
    """The schema of a call's arguments, which are always an object.

    A schema that only lists ``properties`` allows no further ones here. JSON Schema would allow any, but the client's
    function does not know them, and a small model goes on inventing them.
    """
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    only_lists = "properties" in parameters and not _SAYS_MORE.intersection(parameters)
    return {"type": "object", **parameters, **({"additionalProperties": False} if only_lists else {})}
