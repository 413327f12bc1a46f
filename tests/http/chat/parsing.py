"""Drives output parsers, for the tests of all of them."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from hypothesis import strategies as st

from actorserve.http.chat.deltas import OutputParser
from actorserve.http.chat.message import Message

NewParser = Callable[[], OutputParser]


def parsed(new_parser: NewParser, *pieces: str) -> Message:
    """What a parser makes of these pieces."""
    parser, message = new_parser(), Message()
    for piece in pieces:
        message.add(parser.push(piece))
    message.add(parser.finish())
    assert parser.has_tool_calls == bool(message.calls)
    return message


def outline(message: Message) -> tuple[str, str, list[tuple[str, str]]]:
    """The message without the random ids of its calls: reasoning, text, and calls."""
    return message.reasoning, message.text, [(call.name, call.arguments) for call in message.calls]


def texts_of(fragments: Sequence[str]) -> st.SearchStrategy[str]:
    """Texts that consist of ``fragments`` in any order, so that they are often almost a call."""
    return st.lists(st.sampled_from([*fragments, " ", "\n", "x", '"', "{", "}", "\\", "<"]), max_size=20).map("".join)


def assert_any_split(new_parser: NewParser, text: str, cuts: Sequence[int]) -> None:
    """The text, cut at ``cuts``, gives what the whole text gives."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[start:end] for start, end in pairwise(places)]
    whole = outline(parsed(new_parser, text))
    assert outline(parsed(new_parser, *pieces)) == whole
    assert outline(parsed(new_parser, *text)) == whole


CUTS = st.lists(st.integers(0, 10_000), max_size=8)
