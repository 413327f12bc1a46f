"""Stop strings in a stream."""

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from actorserve.http.answers.stop_strings import StopStrings

_TEXT = st.text(alphabet="abé", max_size=24)
_STOPS = st.lists(st.text(alphabet="abé", min_size=1, max_size=5), max_size=4)


def _searched(text: str, stops: list[str]) -> tuple[str, bool]:
    """The expected result, by a search of the whole text: the first match to end, and of several the longest."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return (text[: min(found)[1]], True) if found else (text, False)


def _streamed(chunks: list[str], stops: list[str]) -> tuple[str, bool]:
    search = StopStrings(stops)
    passed = ""
    stopped = False
    for chunk in chunks:
        more, stopped = search.push(chunk)
        passed += more
    return passed + search.finish(), stopped


@given(text=_TEXT, stops=_STOPS, cuts=st.lists(st.integers(0, 24)))
def test_chunks_make_no_difference(text: str, stops: list[str], cuts: list[int]) -> None:
    """Any chunks give the same result as a search through the whole text."""
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    chunks = [text[begin:end] for begin, end in pairwise(bounds)]
    assert _streamed(chunks, stops) == _searched(text, stops)


@given(text=_TEXT, stops=_STOPS)
def test_every_split_in_two_and_single_characters_agree(text: str, stops: list[str]) -> None:
    """Every split into two chunks or into characters gives the same result as the whole text."""
    expected = _searched(text, stops)
    assert _streamed(list(text), stops) == expected
    for cut in range(len(text) + 1):
        assert _streamed([text[:cut], text[cut:]], stops) == expected


@given(text=_TEXT, stops=_STOPS)
def test_only_a_possible_beginning_is_held_back(text: str, stops: list[str]) -> None:
    """After each character exactly the longest suffix that begins a stop string is withheld."""
    search = StopStrings(stops)
    passed = ""
    for end, character in enumerate(text, start=1):
        more, stopped = search.push(character)
        passed += more
        if stopped:
            break
        beginnings = [n for stop in stops for n in range(1, len(stop)) if text[:end].endswith(stop[:n])]
        assert len(text[:end]) - len(passed) == max(beginnings, default=0)


def test_the_stop_string_is_known() -> None:
    """The search tells which stop string ended the text: the longest of those that ended together."""
    search = StopStrings(["never", "D", "END"])
    search.push("one EN")
    assert search.found is None
    search.push("D")
    assert search.found == "END"


def test_nothing_follows_a_stop() -> None:
    """Text after a stop string, in its chunk or later, never comes out."""
    search = StopStrings(["END"])
    assert search.push("one END two") == ("one ", True)
    assert search.push("three") == ("", True)
    assert search.finish() == ""


def test_a_long_near_miss_takes_linear_time() -> None:
    """A text that almost matches at many places is searched in one pass and passed on whole."""
    text = "a" * 200_000
    assert _streamed([text[:100_000], text[100_000:]], ["a" * 255 + "b"]) == (text, False)


def test_an_empty_stop_string_is_refused() -> None:
    """An empty stop string would match everywhere: it is an error."""
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
