"""Requests that want at most one call."""

from hypothesis import given

from actorserve.http.chat.tools.first_call import FirstCall
from actorserve.http.chat.tools.hermes import HermesCalls
from tests.http.chat.parsing import CUTS, assert_any_split, outline, parsed, texts_of

CALL = '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>'


def first_call() -> FirstCall:
    return FirstCall(HermesCalls())


def test_the_first_call_ends_the_answer() -> None:
    """The text before the first call and the call are given, and everything behind it is dropped."""
    assert outline(parsed(first_call, f"I look. {CALL} Again. {CALL}")) == ("", "I look.", [("look", '{"at": "x"}')])
    assert outline(parsed(first_call, "No call. ")) == ("", "No call. ", [])


@given(texts_of((CALL, "<tool_call>")), CUTS)
def test_any_split(text: str, cuts: list[int]) -> None:
    """The pieces of the text do not matter."""
    assert_any_split(first_call, text, cuts)
