"""Grammars of tool calls, in llguidance's dialect of Lark."""

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
    rules = [f"calls: {text(form.opening)} call {more} {text(form.closing)}"]
    return "\n".join([*rules, *_call_rules(functions, form, token_id, form.before_name)])


def text_grammar(functions: Functions, form: CallForm, token_id: TokenId) -> str:
    """Rules for ``text``: any text, with any number of calls of these functions in it. The form has a trigger."""
    # The trigger stands before a list of calls, or before each call.
    before_name = form.before_name if form.opening else form.before_name.removeprefix(form.trigger)
    calls = "call"
    if form.opening:
        opening, separator, closing = (
            literal(part, form.markers, token_id)
            for part in (form.opening.removeprefix(form.trigger), form.separator, form.closing)
        )
        calls = f"{opening} call ({separator} call)* {closing}"
    trigger = re.escape(form.trigger).replace("/", r"\/")
    if token_id(form.trigger) is None:
        # A lazy lexeme ends at its first trigger, so that no further text can hold one.
        before_calls, rules = "until_calls", [rf"until_calls[lazy]: /(.|\n)*{trigger}/", r"ANY_TEXT: /(.|\n)*/"]
    else:
        before_calls = f"ANY_TEXT {literal(form.trigger, form.markers, token_id)}"
        rules = [rf"ANY_TEXT: /(.|\n)*/ & ~/(.|\n)*{trigger}(.|\n)*/"]
    rules.insert(0, f"text: ({before_calls} {calls})* ANY_TEXT")
    return "\n".join([*rules, *_call_rules(functions, form, token_id, before_name)])


def _call_rules(functions: Functions, form: CallForm, token_id: TokenId, before_name: str) -> list[str]:
    """Rules for ``call``: one call of these functions."""
    rules = [f"call: {' | '.join(f'call_{index}' for index in range(len(functions)))}"]
    end = literal(form.after_arguments, form.markers, token_id)
    for index, (name, parameters) in enumerate(functions.items()):
        begin = literal(f"{before_name}{name}{form.before_arguments}", form.markers, token_id)
        rules.append(f"call_{index}: {begin} arguments_{index} {end}")
        rules.append(f"arguments_{index}: %json {json.dumps(json_schema(_object_schema(parameters), _SPACE))}")
    return rules


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
