"""The calls of Hermes and Qwen."""

import json
import re

import pytest
from hypothesis import given, strategies as st

from actorserve.http.chat.deltas import TextDelta, ToolCallDelta
from actorserve.http.chat.tools.hermes import HermesCalls
from tests.http.chat.parsing import CUTS, assert_any_split, outline, parsed, texts_of

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
FRAGMENTS = (CALL, "<tool_call>", "</tool_call>", '{"name": "f"', ', "arguments": ', '{"a": [1]}', '"id": "i", ', "}")


def test_calls_beside_text() -> None:
    """Text goes before the calls and between them, and the white space around a call is dropped."""
    message = parsed(HermesCalls, f"I look.\n{CALL}\nAgain.\n\n{CALL}\n{CALL}\n")
    assert outline(message) == ("", "I look.\nAgain.", 3 * [("look", '{"at": "x"}')])
    assert all(re.fullmatch("call_[0-9a-f]{24}", call.id) for call in message.calls)
    assert len({call.id for call in message.calls}) == 3


def test_arguments_are_streamed() -> None:
    """A call's first delta comes as soon as its arguments begin, and has its name; the others have fragments."""
    parser = HermesCalls()
    assert parser.push('<tool_call>{"name": "look", "argu') == []
    first = parser.push('ments": {"at')
    assert isinstance(first[0], ToolCallDelta)
    assert first == [ToolCallDelta(0, '{"at', first[0].id, "look")]
    assert parser.push('": "x"') == [ToolCallDelta(0, '": "x"')]
    assert parser.push("}}</tool_call>") == [ToolCallDelta(0, "}")]
    assert parser.finish() == []


def test_text_is_held_only_as_long_as_it_may_begin_a_call() -> None:
    """Text that is not the beginning of a marker goes out at once, and a refused marker with the next character."""
    parser = HermesCalls()
    assert parser.push("a <tool") == [TextDelta("a")]
    assert parser.push("s") == [TextDelta(" <tools")]
    assert parser.push("<tool_call>{") == []
    assert parser.push("x") == [TextDelta("<tool_call>{x")]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>look</tool_call>",
        '<tool_call>{"name": "look"}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "look", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "look", "argum',
        '<tool_call>{"city": "Rome"}</tool_call>',
        "</tool_call>",
        "<tool_call>",
        " \n",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    """A malformed call is given as text, with all of its characters."""
    assert outline(parsed(HermesCalls, text)) == ("", text, [])


@pytest.mark.parametrize(
    ("text", "rest", "arguments"),
    [
        ('<tool_call>{"arguments": {"a": 1}, "name": "look"}</tool_call>', "", '{"a": 1}'),
        ('<tool_call>{"id": "1", "type": "function", "name": "look", "arguments": {}}</tool_call>', "", "{}"),
        ('<tool_call>{"name": "look", "arguments": {}}', "", "{}"),
        ('<tool_call>{"name": "look", "arguments": {"a": "}</tool_call>\\""}}', "", '{"a": "}</tool_call>\\""}'),
        ('<tool_call>{"name": "look", "arguments": {"a": 1}\n</tool_call>\nDone', "\nDone", '{"a": 1}'),
        ('<tool_call>{"name": "look", "arguments": {"a": 1</tool_call>', "", '{"a": 1'),
        ('<tool_call>{"name": "look", "arguments": {"a": "', "", '{"a": "'),
    ],
)
def test_imperfect_calls(text: str, rest: str, arguments: str) -> None:
    """Keys in any order are understood; a missing brace or marker, or an early end, costs no more than its own call."""
    assert outline(parsed(HermesCalls, text)) == ("", rest, [("look", arguments)])


@given(texts_of(FRAGMENTS), CUTS)
def test_any_split(text: str, cuts: list[int]) -> None:
    """The pieces of the text do not matter."""
    assert_any_split(HermesCalls, text, cuts)


@given(texts_of(("<tool_call>", "</tool_call>", '"name": ', '"arguments"')))
def test_nothing_is_lost(text: str) -> None:
    """Text without a call is given whole."""
    message = parsed(HermesCalls, text)
    assert message.calls or message.text == text


JSON = st.recursive(st.text() | st.integers() | st.booleans() | st.none(), lambda inner: st.lists(inner, max_size=3))


@given(st.dictionaries(st.text(), JSON, max_size=4), st.booleans(), CUTS)
def test_all_arguments(arguments: dict[str, object], ascii_only: bool, cuts: list[int]) -> None:
    """Whatever JSON a model writes as arguments, the call has exactly that text."""
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    text = f'<tool_call>\n{{"name": "look", "arguments": {written}}}\n</tool_call>'
    assert outline(parsed(HermesCalls, text)) == ("", "", [("look", written)])
    assert_any_split(HermesCalls, text, cuts)
