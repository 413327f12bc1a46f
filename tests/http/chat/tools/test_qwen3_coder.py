"""The calls of Qwen3-Coder."""

import json

import pytest
from hypothesis import given, strategies as st

from actorserve.http.chat.deltas import ToolCallDelta
from actorserve.http.chat.tools.call_form import Functions
from actorserve.http.chat.tools.qwen3_coder import Qwen3CoderCalls
from tests.http.chat.parsing import CUTS, assert_any_split, outline, parsed, texts_of

FUNCTIONS: Functions = {"write": {"properties": {"text": {"type": "string"}, "at": {"type": "integer"}}}}
CALL = """<tool_call>
<function=write>
<parameter=text>
if "a" < b:
  return

</parameter>
<parameter=at>
12
</parameter>
</function>
</tool_call>"""
WRITTEN = '{"text": "if \\"a\\" < b:\\n  return\\n", "at": 12}'
FRAGMENTS = (
    "<tool_call>",
    "<function=write>",
    "<parameter=text>",
    "<parameter=at>",
    "</parameter>",
    "</function>",
    "</tool_call>",
    '{"name": "write", "arguments": {',
)


def coder() -> Qwen3CoderCalls:
    return Qwen3CoderCalls(FUNCTIONS)


def test_calls_beside_text() -> None:
    """Parameters become JSON: strings by the schema, without the line breaks at their ends, and other values as they
    are."""
    message = parsed(coder, f"I write.\n\n{CALL}\n{CALL}\n")
    assert outline(message) == ("", "I write.", 2 * [("write", WRITTEN)])
    assert json.loads(WRITTEN) == {"text": 'if "a" < b:\n  return\n', "at": 12}


@pytest.mark.parametrize(
    ("value", "written"),
    [("[1, 2]", "[1, 2]"), ("True", "true"), ("twelve", '"twelve"'), ("NaN", '"NaN"'), ("", '""'), ("01", '"01"')],
)
def test_values_that_are_not_declared_as_strings(value: str, written: str) -> None:
    """A value that is JSON stays JSON, and any other value becomes a string."""
    text = f"<function=write><parameter=at>{value}</parameter></function>"
    assert outline(parsed(coder, text)) == ("", "", [("write", f'{{"at": {written}}}')])


def test_strings_are_streamed() -> None:
    """A long string goes out while the model writes it."""
    parser = coder()
    parser.push("<tool_call><function=write><parameter=text>\n")
    assert parser.push('say "hi"\n') == [ToolCallDelta(0, 'say \\"hi\\"')]
    assert parser.push("</par") == []
    assert parser.push("ty>") == [ToolCallDelta(0, "\\n</party>")]


@pytest.mark.parametrize(
    ("text", "rest", "arguments"),
    [
        (CALL.removeprefix("<tool_call>\n"), "", WRITTEN),
        ("<tool_call><function=write></function></tool_call>", "", "{}"),
        ("<tool_call><function=write></tool_call>Done", "Done", "{}"),
        ("<tool_call><function=write><parameter=text>x", "", '{"text": "x'),
        ('<tool_call>{"name": "write", "arguments": {"at": 1}}</tool_call>', "", '{"at": 1}'),
    ],
)
def test_imperfect_calls(text: str, rest: str, arguments: str) -> None:
    """Outer markers may be missing, a call may end early, and Hermes' form is understood."""
    assert outline(parsed(coder, text)) == ("", rest, [("write", arguments)])


@pytest.mark.parametrize("text", ["<tool_call>", "<function=>", "<function=write", "<function=a\n>", CALL[:20]])
def test_what_is_no_call_stays_text(text: str) -> None:
    """A malformed call is given as text, with all of its characters."""
    assert outline(parsed(coder, text)) == ("", text, [])


@given(texts_of(FRAGMENTS), CUTS)
def test_any_split(text: str, cuts: list[int]) -> None:
    """The pieces of the text do not matter."""
    assert_any_split(coder, text, cuts)


@given(st.text())
def test_all_strings(text: str) -> None:
    """Whatever text a parameter has, the arguments are JSON of it."""
    message = parsed(coder, f"<function=write>\n<parameter=text>\n{text}\n</parameter>\n</function>")
    assert json.loads(message.calls[0].arguments) == {"text": text}
