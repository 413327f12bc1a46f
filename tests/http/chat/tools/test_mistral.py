"""The calls of Mistral's models."""

import re

import pytest
from hypothesis import given

from actorserve.http.chat.tools.mistral import MistralCalls
from tests.http.chat.parsing import CUTS, assert_any_split, outline, parsed, texts_of

FRAGMENTS = (
    "[TOOL_CALLS]",
    '[{"name": "f", "arguments": {"a": 1}}',
    "look",
    "[ARGS]",
    '{"a": 2}',
    "[CALL_ID]",
    "1",
    ",",
    "]",
)


def test_a_list_of_calls() -> None:
    """The older form is one marker and a list of objects."""
    text = 'I look. [TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}}]'
    message = parsed(MistralCalls, text)
    assert outline(message) == ("", "I look.", [("f", '{"a": [1]}'), ("g", "{}")])
    assert all(re.fullmatch("[0-9a-zA-Z]{9}", call.id) for call in message.calls)


def test_calls_with_names_before_them() -> None:
    """The newer form has a marker for each call, its name, perhaps its id, and its arguments."""
    text = '[TOOL_CALLS]f[ARGS]{"a": "]"}[TOOL_CALLS]g[CALL_ID]a1b2c3d4e[ARGS] {}'
    message = parsed(MistralCalls, text)
    assert outline(message) == ("", "", [("f", '{"a": "]"}'), ("g", "{}")])
    assert message.calls[1].id == "a1b2c3d4e"


@pytest.mark.parametrize(
    "text", ["[TOOL_CALLS]", "[TOOL_CALLS] no", "[TOOL_CALLS]f[ARGS]x", "[TOOL_CALLS][]", "[TOOL_CALLS]" + 999 * "f"]
)
def test_what_is_no_call_stays_text(text: str) -> None:
    """A malformed call is given as text, with all of its characters."""
    assert outline(parsed(MistralCalls, text)) == ("", text, [])


@given(texts_of(FRAGMENTS), CUTS)
def test_any_split(text: str, cuts: list[int]) -> None:
    """The pieces of the text do not matter."""
    assert_any_split(MistralCalls, text, cuts)
