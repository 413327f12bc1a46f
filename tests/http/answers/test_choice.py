"""A choice turns tokens into certain text, for any boundaries of tokens."""

from hypothesis import given, strategies as st

from actorserve.core.effects import Deliver, End
from actorserve.core.messages import FinishReason, RefusalReason, RequestSpec, SamplingParams
from actorserve.http.answers.choice import Choice, Piece
from actorserve.http.answers.detokenizer import Detokenizer
from tests.http.fakes import END, TOKENIZER, deliver, delivered, end, one_by_one


def choice(
    stop: tuple[str, ...] = (), *, min_tokens: int = 0, stop_token_ids: tuple[int, ...] = (END,), top_logprobs: int = -1
) -> Choice:
    sampling = SamplingParams(
        seed=1, max_tokens=99, min_tokens=min_tokens, stop_token_ids=stop_token_ids, top_logprobs=top_logprobs
    )
    return Choice(RequestSpec("r", (), sampling), Detokenizer(TOKENIZER), stop)


def run(subject: Choice, effects: list[Deliver | End]) -> list[Piece]:
    """Push until the choice ends."""
    pieces: list[Piece] = []
    for effect in effects:
        piece = subject.push(effect)
        if piece is not None:
            pieces.append(piece)
        if subject.end is not None:
            return pieces
    raise AssertionError("no end")


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@given(st.text(max_size=30), st.integers(1, 5))
def test_text_in_any_pieces(text: str, size: int) -> None:
    """The pieces add up to the text, none is empty, and no character is broken, for any number of tokens at once."""
    token_ids = TOKENIZER.encode(text)
    batches = [deliver(token_ids[i : i + size]) for i in range(0, len(token_ids), size)]
    subject = choice(stop_token_ids=())
    pieces = run(subject, [*batches, end(FinishReason.LENGTH)])
    assert text_of(pieces) == TOKENIZER.decode(token_ids)
    assert all(piece.text for piece in pieces)
    assert subject.end == end(FinishReason.LENGTH)
    assert subject.num_tokens == len(token_ids)


@given(st.text("abX", max_size=20), st.lists(st.text("abX", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings(text: str, stops: list[str]) -> None:
    """The text ends before the stop string that is complete first (or the longest of several), for any chunks."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    subject = choice(tuple(stops))
    pieces = run(subject, one_by_one(text))
    assert text_of(pieces) == (text[: min(found)[1]] if found else text)
    assert subject.end == end(FinishReason.STOP if found else FinishReason.LENGTH)
    assert all(piece.text for piece in pieces)


def test_unfinished_character_at_the_end() -> None:
    """A character that the length limit cuts becomes one replacement character."""
    first_bytes = TOKENIZER.encode("€")[:2]
    pieces = run(choice(), [delivered("a"), deliver(first_bytes), end(FinishReason.LENGTH)])
    assert text_of(pieces) == "a�"


def test_stop_token_is_no_text() -> None:
    """The token that stopped the request counts, but its text is not part of the answer."""
    (dot,) = TOKENIZER.encode(".")
    subject = choice(stop_token_ids=(dot,))
    pieces = run(subject, [delivered("a."), end(FinishReason.STOP)])
    assert text_of(pieces) == "a"
    assert subject.num_tokens == 2
    assert subject.end == end(FinishReason.STOP)


def test_stop_token_before_the_minimum_is_text() -> None:
    """A stop token that did not stop the request is text like any other."""
    (dot,) = TOKENIZER.encode(".")
    subject = choice(stop_token_ids=(dot,), min_tokens=3)
    assert text_of(run(subject, [delivered("a."), delivered("b."), end(FinishReason.STOP)])) == "a.b"
    subject = choice(stop_token_ids=(dot,), min_tokens=3)
    assert text_of(run(subject, [delivered("a."), end(FinishReason.LENGTH)])) == "a."


def test_stop_string_before_the_minimum_is_text() -> None:
    """A stop string ends the text only after the minimum number of tokens."""
    subject = choice(("b",), min_tokens=2)
    assert text_of(run(subject, one_by_one("abab"))) == "aba"
    assert subject.num_tokens == 4


def test_a_stop_string_in_the_last_text_replaces_the_end() -> None:
    """A stop string that only the end of the request makes certain turns the end into a stop."""
    subject = choice(("�",))
    pieces = run(subject, [delivered("a"), deliver(TOKENIZER.encode("€")[:2]), end(FinishReason.LENGTH)])
    assert text_of(pieces) == "a"
    assert subject.end == end(FinishReason.STOP)


def test_logprobs_go_with_their_text() -> None:
    """A token goes out once, with the piece in which its text begins. Tokens after a stop string do not go out."""
    effects = [deliver((token_id,)) for token_id in TOKENIZER.encode("a€b--c")]
    subject = choice(("--",), top_logprobs=0)
    pieces = run(subject, [*effects, end(FinishReason.LENGTH)])
    assert [(piece.text, [token.offset for token in piece.tokens]) for piece in pieces] == [
        ("a", [0]),
        ("€", [1, 1, 1]),
        ("b", [2]),
    ]
    assert subject.end == end(FinishReason.STOP)
    assert subject.num_tokens == 7


def test_pieces_without_logprobs_have_no_tokens() -> None:
    """If the client wants no log-probabilities, tokens are counted and not kept."""
    subject = choice()
    assert [piece.tokens for piece in run(subject, one_by_one("abc"))] == [(), (), ()]
    assert subject.num_tokens == 3


def test_refusal() -> None:
    """A refusal ends the choice, and the End has its reason."""
    subject = choice()
    refused = end(FinishReason.ERROR, RefusalReason.OVERLOADED, 3.0)
    assert run(subject, [refused]) == []
    assert subject.end == refused
