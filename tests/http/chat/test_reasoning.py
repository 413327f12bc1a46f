"""Thoughts are split from the answer."""

import pytest
from hypothesis import given, strategies as st

from actorserve.http.chat.deltas import ReasoningDelta, TextDelta
from actorserve.http.chat.reasoning import Thoughts
from actorserve.http.chat.tools.hermes import HermesCalls
from tests.http.chat.parsing import CUTS, assert_any_split, outline, parsed, texts_of

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def thoughts(begun: bool = False) -> Thoughts:
    return Thoughts(HermesCalls(), begun=begun)


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("<think>\nHm.\nWell.\n</think>\n\nYes. ", "Hm.\nWell.", "Yes. "),
        ("\n<think></think>Yes", "", "Yes"),
        ("<think>\n\n</think>\n\n", "", ""),
        ("<think>Hm. ", "Hm. ", ""),
        ("Yes <think>no</think>", "", "Yes <think>no</think>"),
        (" Yes", "", " Yes"),
        ("<thinking", "", "<thinking"),
        ("<thi", "", "<thi"),
    ],
)
def test_thoughts_come_first(text: str, reasoning: str, answer: str) -> None:
    """Thoughts stand at the beginning of the text, and the white space at their borders is dropped."""
    assert outline(parsed(thoughts, text)) == (reasoning, answer, [])


def test_the_prompt_may_begin_the_thoughts() -> None:
    """If the prompt has the opening marker, the text begins inside the thoughts."""
    assert outline(parsed(lambda: thoughts(begun=True), "Hm.\n</think>\n\nYes")) == ("Hm.", "Yes", [])


def test_calls_inside_thoughts_are_thoughts() -> None:
    """Tool calls are looked for behind the thoughts only."""
    message = parsed(thoughts, f"<think>{CALL}</think>{CALL}")
    assert outline(message) == (CALL, "", [("f", "{}")])


def test_thoughts_are_streamed() -> None:
    """Thoughts go out as they come; only what may be the closing marker is held."""
    parser = thoughts()
    assert parser.push("<think>\nHm ") == [ReasoningDelta("Hm")]
    assert parser.push("</th") == []
    assert parser.push("e. ") == [ReasoningDelta(" </the.")]
    assert parser.push("</think>\n") == []
    assert parser.push("\nYes") == [TextDelta("Yes")]


@given(texts_of(("<think>", "</think>", "Hm.", CALL)), st.booleans(), CUTS)
def test_any_split(text: str, begun: bool, cuts: list[int]) -> None:
    """The pieces of the text do not matter."""
    assert_any_split(lambda: thoughts(begun), text, cuts)
