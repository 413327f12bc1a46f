"""Requests that want at most one call."""

import pytest
from hypothesis import given

from actorserve.http.chat.tools.call_form import CallForm
from actorserve.http.chat.tools.first_call import FirstCall
from actorserve.http.chat.tools.hermes import HERMES, HermesCalls
from actorserve.http.chat.tools.llama3 import LLAMA3
from actorserve.http.chat.tools.mistral import MISTRAL_LIST, MISTRAL_NAMED
from actorserve.http.chat.tools.qwen3_coder import QWEN3_CODER
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


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, CALL),
        (LLAMA3, '{"name": "look", "parameters": {"at": "x"}}'),
        (MISTRAL_LIST, '[TOOL_CALLS][{"name": "look", "arguments": {"at": "x"}}]'),
        (MISTRAL_NAMED, '[TOOL_CALLS]look[ARGS]{"at": "x"}'),
        (QWEN3_CODER, "<tool_call><function=look><parameter=at>x</parameter></function></tool_call>"),
    ],
)
def test_an_answer_is_complete_with_its_first_call(form: CallForm, text: str) -> None:
    """In every form the answer is complete as soon as the call is, and not before."""
    parser = FirstCall(form.new_reader({"look": None}))
    parser.push(f"{'' if form is LLAMA3 else 'I look. '}")
    num_read = 0
    while not parser.is_complete:
        parser.push(text[num_read])
        num_read += 1
    rest = text[num_read:]
    assert not rest.strip("]}") or rest.strip() in ("</tool_call>", "</function></tool_call>")
    assert outline(parsed(lambda: FirstCall(form.new_reader({"look": None})), text[:num_read]))[2] == [
        ("look", '{"at": "x"}')
    ]
