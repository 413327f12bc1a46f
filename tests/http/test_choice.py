"""A choice: from tokens to text that is sure, whatever the tokens' boundaries."""

from hypothesis import given, strategies as st

from actorserve.core.messages import FinishReason, RefusalReason, SamplingParams
from actorserve.http.choice import Choice, Finish, Piece
from actorserve.http.detokenizer import Detokenizer
from actorserve.http.service import Ended, Produced
from tests.http.fakes import END, TOKENIZER, one_by_one, produced


def choice(
    stop: tuple[str, ...] = (), *, min_tokens: int = 0, stop_token_ids: tuple[int, ...] = (END,), top_logprobs: int = -1
) -> Choice:
    sampling = SamplingParams(
        seed=1, max_tokens=99, min_tokens=min_tokens, stop_token_ids=stop_token_ids, top_logprobs=top_logprobs
    )
    return Choice(sampling, Detokenizer(TOKENIZER), stop)


def run(subject: Choice, items: list[Produced | Ended]) -> tuple[list[Piece], Finish]:
    """Push until the choice finishes."""
    pieces: list[Piece] = []
    for item in items:
        for event in subject.push(item):
            if isinstance(event, Finish):
                return pieces, event
            pieces.append(event)
    raise AssertionError("no finish")


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@given(st.text(max_size=30), st.integers(1, 5))
def test_text_in_any_pieces(text: str, size: int) -> None:
    """The pieces are the text, none is empty, and no character is broken, however many tokens come at once."""
    token_ids = TOKENIZER.encode(text)
    batches = [Produced(tuple(token_ids[i : i + size])) for i in range(0, len(token_ids), size)]
    pieces, finish = run(choice(stop_token_ids=()), [*batches, Ended(FinishReason.LENGTH)])
    assert text_of(pieces) == TOKENIZER.decode(token_ids)
    assert all(piece.text for piece in pieces)
    assert finish == Finish(FinishReason.LENGTH, len(token_ids))


@given(st.text("abX", max_size=20), st.lists(st.text("abX", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings(text: str, stops: list[str]) -> None:
    """The text ends before the stop string that is complete first (the longest of those), however it is cut."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    pieces, finish = run(choice(tuple(stops)), one_by_one(text))
    assert text_of(pieces) == (text[: min(found)[1]] if found else text)
    assert finish.reason is (FinishReason.STOP if found else FinishReason.LENGTH)
    assert all(piece.text for piece in pieces)


def test_unfinished_character_at_the_end() -> None:
    """A character that the length limit cuts is one replacement character, not lost and not an error."""
    first_bytes = tuple(TOKENIZER.encode("€"))[:2]
    pieces, _ = run(choice(), [produced("a"), Produced(first_bytes), Ended(FinishReason.LENGTH)])
    assert text_of(pieces) == "a�"


def test_stop_token_is_no_text() -> None:
    """The token that stopped the request counts, and is not part of its text, even where it has one."""
    (dot,) = TOKENIZER.encode(".")
    pieces, finish = run(choice(stop_token_ids=(dot,)), [produced("a."), Ended(FinishReason.STOP)])
    assert text_of(pieces) == "a"
    assert finish == Finish(FinishReason.STOP, 2)


def test_stop_token_before_the_minimum_is_text() -> None:
    """A stop token that did not stop the request is text like any other."""
    (dot,) = TOKENIZER.encode(".")
    subject = choice(stop_token_ids=(dot,), min_tokens=3)
    pieces, _ = run(subject, [produced("a."), produced("b."), Ended(FinishReason.STOP)])
    assert text_of(pieces) == "a.b"
    subject = choice(stop_token_ids=(dot,), min_tokens=3)
    pieces, _ = run(subject, [produced("a."), Ended(FinishReason.LENGTH)])
    assert text_of(pieces) == "a."


def test_stop_string_before_the_minimum_is_text() -> None:
    """A stop string only counts after the least number of tokens."""
    pieces, finish = run(choice(("b",), min_tokens=2), one_by_one("abab"))
    assert text_of(pieces) == "aba"
    assert finish.num_tokens == 4


def test_logprobs_go_with_their_text() -> None:
    """Each token goes out once, with the piece in which its text begins; those after a stop string do not."""
    items = [Produced((token_id,)) for token_id in TOKENIZER.encode("a€b--c")]
    pieces, finish = run(choice(("--",), top_logprobs=0), [*items, Ended(FinishReason.LENGTH)])
    assert [(piece.text, [token.offset for token in piece.tokens]) for piece in pieces] == [
        ("a", [0]),
        ("€", [1, 1, 1]),
        ("b", [2]),
    ]
    assert finish == Finish(FinishReason.STOP, 7)


def test_nothing_is_kept_without_logprobs() -> None:
    """A choice that nobody wants log-probabilities of carries no tokens along."""
    pieces, _ = run(choice(), one_by_one("abc"))
    assert [piece.tokens for piece in pieces] == [(), (), ()]
    assert [piece.num_tokens for piece in pieces] == [1, 2, 3]


def test_refusal() -> None:
    """A refusal comes out as a failed finish that still knows why."""
    _, finish = run(choice(), [Ended(FinishReason.ERROR, RefusalReason.OVERLOADED, 3.0)])
    assert finish.failed
    assert (finish.refusal, finish.retry_after_s) == (RefusalReason.OVERLOADED, 3.0)
