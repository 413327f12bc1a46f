"""From token ids to text, one token at a time."""

from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from actorserve.http.answers.detokenizer import Detokenizer
from actorserve.model_files.describe import describe
from actorserve.model_files.tokenizer import Tokenizer, load_tokenizer
from tests.model_files.builders import SENTENCEPIECE_TOKENS, write_gguf


@pytest.fixture(scope="module")
def byte_level(default_model_path: Path) -> Tokenizer:
    return load_tokenizer(describe(default_model_path))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(describe(write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")))


def _text(detokenizer: Detokenizer, ids: list[int]) -> str:
    return "".join(map(detokenizer.push, ids))


def _check(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    assert _text(detokenizer, ids) + detokenizer.finish() == tokenizer.decode(
        ids, skip_special_tokens=skip_special_tokens
    )
    assert detokenizer.finish() == ""


@pytest.mark.model
@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=40), skip=st.booleans())
def test_byte_level_pieces_add_up(byte_level: Tokenizer, ids: list[int], skip: bool) -> None:
    """Random ids of the default model, pushed one by one, give the same text as one decode of all."""
    _check(byte_level, ids, skip)


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, len(SENTENCEPIECE_TOKENS) - 1), max_size=40),
    skip=st.booleans(),
)
def test_byte_fallback_pieces_add_up(byte_fallback: Tokenizer, ids: list[int], skip: bool) -> None:
    """The same test with byte-fallback tokens."""
    _check(byte_fallback, ids, skip)


@pytest.mark.model
@settings(max_examples=200, deadline=None)
@given(text=st.text("aé \n日本語한🏳👍🏽\u200d", max_size=30))
def test_no_character_is_ever_broken(byte_level: Tokenizer, text: str) -> None:
    """While valid text streams token by token, the output is a prefix of the text, at most one character behind."""
    detokenizer = Detokenizer(byte_level, skip_special_tokens=False)
    shown = ""
    for token_id in byte_level.encode(text):
        shown += detokenizer.push(token_id)
        assert text.startswith(shown)
    assert shown == text
    assert detokenizer.finish() == ""


@pytest.mark.model
def test_special_tokens_are_not_text(byte_level: Tokenizer) -> None:
    """Special tokens are skipped by default."""
    ids = byte_level.encode("a<|im_end|>b")
    assert _text(Detokenizer(byte_level), ids) == "ab"
    assert _text(Detokenizer(byte_level, skip_special_tokens=False), ids) == "a<|im_end|>b"


def test_a_first_space_goes_only_at_the_beginning_of_a_text(byte_fallback: Tokenizer) -> None:
    """SentencePiece's space is dropped if the output begins the text, and kept if it continues a prompt."""
    hello, world = byte_fallback.encode("hello world", add_special_tokens=False)
    assert _text(Detokenizer(byte_fallback), [hello, world]) == "hello world"
    assert Detokenizer(byte_fallback, [1]).push(hello) == "hello"
    assert Detokenizer(byte_fallback, [1, hello]).push(world) == " world"


def test_a_character_begun_in_the_prompt_ends_in_the_output(byte_fallback: Tokenizer) -> None:
    """The prompt's last bytes and the output's first bytes can form one character."""
    first, second = byte_fallback.encode("é", add_special_tokens=False)[-2:]
    assert Detokenizer(byte_fallback, [first]).push(second) == "é"
    assert Detokenizer(byte_fallback, [second]).push(second) == "\ufffd"
