"""The calls of Llama 3."""

import pytest
from hypothesis import given

from actorserve.http.chat.deltas import TextDelta
from actorserve.http.chat.tools.llama3 import Llama3Calls
from tests.http.chat.parsing import CUTS, assert_any_split, outline, parsed, texts_of

CALL = '{"name": "look", "parameters": {"at": "x"}}'
FRAGMENTS = (CALL, "<|python_tag|>", ";", '{"name": "other", "parameters": {}}', '{"name": "look"', ', "parameters": {')


def llama() -> Llama3Calls:
    return Llama3Calls({"look": None})


@pytest.mark.parametrize(
    ("text", "rest", "num_calls"),
    [
        (CALL, "", 1),
        (f"\n<|python_tag|>{CALL}", "", 1),
        (f"{CALL}; {CALL}\n{CALL}", "", 3),
        (f"I look. <|python_tag|>{CALL};{CALL}", "I look.", 2),
        (f"{CALL} and more", " and more", 1),
        (f"{CALL}; or not", "; or not", 1),
    ],
)
def test_calls(text: str, rest: str, num_calls: int) -> None:
    """A call stands alone or behind its marker, and semicolons may separate several."""
    assert outline(parsed(llama, text)) == ("", rest, num_calls * [("look", '{"at": "x"}')])


@pytest.mark.parametrize(
    "text",
    [
        '{"answer": 42}',
        '{"name": "Bob", "parameters": {}}',
        f"The call is {CALL}",
        "<|python_tag|>print(1)",
        "{",
        "<|python",
    ],
)
def test_answers_in_json_stay_text(text: str) -> None:
    """Without its marker, an object is a call only at the beginning, and only of a function of the request."""
    assert outline(parsed(llama, text)) == ("", text, [])


def test_an_answer_in_json_is_held_only_to_its_first_key() -> None:
    """An object that is no call goes out as soon as it deviates."""
    parser = llama()
    assert parser.push('{"answ') == []
    assert parser.push('er": ') == []
    assert parser.push("42") == [TextDelta('{"answer": 42')]


def test_a_marked_call_of_an_unknown_function() -> None:
    """Behind the marker even an unknown name is a call, so that the client can tell the model its mistake."""
    assert outline(parsed(llama, '<|python_tag|>{"name": "f", "parameters": {}}')) == ("", "", [("f", "{}")])


@given(texts_of(FRAGMENTS), CUTS)
def test_any_split(text: str, cuts: list[int]) -> None:
    """The pieces of the text do not matter."""
    assert_any_split(llama, text, cuts)
