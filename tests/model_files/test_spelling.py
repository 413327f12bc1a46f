"""What is told of a text's tokens without making them is true of the tokens."""

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, normalizers, pre_tokenizers

from actorserve.model_files.describe import describe
from actorserve.model_files.pieces import ByteLevelPieces
from actorserve.model_files.spelling import Spelling
from actorserve.model_files.tokenizer import Tokenizer, load_tokenizer
from tests.model_files.builders import write_gguf

TEXTS = st.text(st.one_of(st.characters(), st.sampled_from("aAbB zZ \n\t0019'sdll<|im_end|>\u2581e\u0301\u1100\u1161")))
MANY = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(describe(write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")))


def spelled_by_tokens(tokenizer: Tokenizer, text: str) -> bytes:
    return b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, add_special_tokens=False)))


@MANY
@given(text=TEXTS)
@example(text="\u2581")
def test_tokens_spell_their_text(default_tokenizer: Tokenizer, text: str) -> None:
    """The bytes of a text's tokens are known before the tokens are, except for bytes that have no token."""
    spelled = default_tokenizer.spelled(text)
    assert spelled is not None
    dropped = set(spelled_by_tokens(default_tokenizer, text)) - set(spelled)
    assert spelled_by_tokens(default_tokenizer, text).translate(None, bytes(dropped)) == spelled


@MANY
@given(text=TEXTS)
def test_sentencepiece_adds_spaces_only(sentencepiece: Tokenizer, text: str) -> None:
    """SentencePiece's tokens spell the text, and perhaps spaces before it."""
    spelled = sentencepiece.spelled(text)
    if spelled is None:  # this vocabulary lacks bytes, so its tokens need not spell a text
        return
    assert spelled_by_tokens(sentencepiece, text).replace(b" ", b"") == spelled.replace(b" ", b"")


@MANY
@given(words=st.lists(st.text(st.characters(), max_size=8), max_size=60), num_chars=st.integers(0, 40))
def test_a_text_in_parts_has_the_same_tokens(default_tokenizer: Tokenizer, words: list[str], num_chars: int) -> None:
    """The tokens of a text's parts are the text's tokens, wherever the parts end."""
    spelling = Spelling(default_tokenizer._backend, ByteLevelPieces())
    assert spelling.is_cut_before_words
    text = " ".join(words)
    parts = list(spelling.parts(text, num_chars))
    assert "".join(parts) == text
    encoded = [default_tokenizer.encode(part, add_special_tokens=False) for part in parts]
    assert [token for ids in encoded for token in ids] == default_tokenizer.encode(text, add_special_tokens=False)


def test_long_texts_come_in_several_lists(default_tokenizer: Tokenizer) -> None:
    """A long English text is encoded in several lists, so that its reader can stop early; together they are whole."""
    text = "the quick brown fox's 12 socks, " * 5000
    lists = list(default_tokenizer.encode_in_parts(text))
    assert len(lists) > 5
    assert [token for ids in lists for token in ids] == default_tokenizer.encode(text)


def backend(**changes: object) -> Backend:
    """A byte-level tokenizer whose tokens are the bytes, with some attributes changed."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Backend(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_a_tokenizer_that_removes_text_is_not_known() -> None:
    """Nothing is told of texts whose tokens may lack a part of the text."""
    assert Spelling(backend(), ByteLevelPieces()).is_known
    for changes in (
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.Lowercase()},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"pre_tokenizer": pre_tokenizers.Split(" ", "removed")},
    ):
        assert not Spelling(backend(**changes), ByteLevelPieces()).is_known, changes


@pytest.mark.parametrize("options", [{"lstrip": True}, {"rstrip": True}, {"single_word": True}])
def test_an_added_token_that_takes_spaces_is_not_known(options: dict[str, bool]) -> None:
    """Nothing is told of texts if an added token may swallow the spaces around it."""
    made = backend()
    made.add_tokens([AddedToken("<x>", **options)])
    assert not Spelling(made, ByteLevelPieces()).is_known


def test_a_text_without_splits_is_not_cut() -> None:
    """A tokenizer that may merge over spaces, or that has an added token with a space, gets its texts whole."""
    whole = backend(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    assert not Spelling(whole, ByteLevelPieces()).is_cut_before_words
    made = backend()
    made.add_tokens(["red fox"])
    assert list(Spelling(made, ByteLevelPieces()).parts("a red fox runs", 0)) == ["a red fox runs"]
