"""Tokenizers, from GGUF metadata and from tokenizer.json."""

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tokenizers import pre_tokenizers

from actorserve.errors import ModelError
from actorserve.model_files.describe import describe
from actorserve.model_files.description import ModelDescription
from actorserve.model_files.gguf_tokenizer import build_tokenizer
from actorserve.model_files.tokenizer import Tokenizer, load_tokenizer, tokenizer_digest
from tests.model_files.builders import (
    SENTENCEPIECE_TOKENS,
    SENTENCEPIECE_TYPES,
    tiny_config,
    write_folder,
    write_gguf,
)

_TEXTS = [
    "",
    "Hello, world! I don't think we've met; they'll come.",
    "  leading and trailing  ",
    "tabs\tand\n\nnewlines\r\n \n",
    "12345 67 8.90  1",
    "    def f(a, b):\n        return a + b  # 42\n",
    "x = [1, 22,\n    333]",
    "日本語のテキスト 中文 한국어",
    "émojis 👩‍🚀🏳️‍🌈👍🏽 ½ ² ٣ 𝒳𝓎",
    "مرحبا بالعالم",
    "\u00a0nbsp\u200bzwsp a\x00b",
    "<|im_start|>user\nhi<|im_end|>\n<repo_name>a/b<|endoftext|>",
]


@pytest.fixture(scope="module")
def reference(default_model_path: Path) -> Any:
    """Transformers' tokenizer of the same file.

    It splits as GPT-2 does; SmolLM2's own tokenizer.json (and ``tokenizer.ggml.pre``) splits each digit off first.
    """
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(default_model_path.parent, gguf_file=default_model_path.name)
    digits = pre_tokenizers.Digits(individual_digits=True)
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, reference.backend_tokenizer.pre_tokenizer]
    )
    return reference


@pytest.mark.model
@pytest.mark.parametrize("text", _TEXTS)
def test_the_default_model_encodes_and_decodes_as_transformers(
    default_tokenizer: Tokenizer, reference: Any, text: str
) -> None:
    """Ids and texts equal those of transformers, which reads the same file."""
    ids = default_tokenizer.encode(text)
    assert ids == reference.encode(text)
    assert default_tokenizer.decode(ids, skip_special_tokens=False) == text
    assert default_tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@pytest.mark.model
@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=40))
def test_random_ids_decode_as_transformers(default_tokenizer: Tokenizer, reference: Any, ids: list[int]) -> None:
    """Any ids, broken characters included, decode to the same text as the library's byte-level decoder."""
    assert default_tokenizer.decode(ids, skip_special_tokens=False) == reference.decode(ids)


@pytest.mark.model
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_is_encoded_as_transformers(default_tokenizer: Tokenizer, reference: Any, text: str) -> None:
    """The ids of any Unicode text equal the reference's."""
    assert default_tokenizer.encode(text) == reference.encode(text)


@pytest.mark.model
def test_special_tokens_in_text_are_special(default_tokenizer: Tokenizer) -> None:
    """The text of a special token becomes that token, and is not part of the decoded answer."""
    ids = default_tokenizer.encode("a<|im_end|>b")
    assert 2 in ids
    assert 2 in default_tokenizer.special_token_ids
    assert default_tokenizer.decode(ids) == "ab"
    assert default_tokenizer.token_id("<|im_end|>") == 2


@pytest.mark.model
def test_ids_without_a_token_give_nothing(default_tokenizer: Tokenizer) -> None:
    """Ids outside the vocabulary decode to no text."""
    assert default_tokenizer.decode([-1, 49152, 2**40]) == ""
    assert default_tokenizer.token_bytes(2**40) == b""


def test_other_threads_run_while_a_long_text_is_encoded(default_tokenizer: Tokenizer) -> None:
    """A thread that encodes does not hold Python's lock, which would stop the event loop and all streams with it."""
    encoding = threading.Thread(target=default_tokenizer.encode, args=("the quick brown fox " * 50_000,))
    encoding.start()
    num_turns = 0
    while encoding.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 10  # one or two, if the lock is held


@pytest.mark.model
def test_lone_surrogates_are_encoded(default_tokenizer: Tokenizer) -> None:
    """A lone surrogate, which JSON can contain, becomes a question mark, not an error."""
    assert default_tokenizer.decode(default_tokenizer.encode("a\ud800b")) == "a?b"


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> ModelDescription:
    return describe(write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf"))


def test_sentencepiece_merges_by_score(sentencepiece: ModelDescription) -> None:
    """The best-scored pieces are merged, bos comes first, and text without a piece falls back to bytes."""
    tokenizer = load_tokenizer(sentencepiece)
    names = [SENTENCEPIECE_TOKENS[token_id] for token_id in tokenizer.encode("hello world é")]
    assert names == ["<s>", "▁hello", "▁world", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("hello world é")) == "hello world é"
    assert tokenizer.encode("hello", add_special_tokens=False) == [SENTENCEPIECE_TOKENS.index("▁hello")]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(0, len(SENTENCEPIECE_TOKENS) - 1), max_size=30))
def test_byte_fallback_decodes_as_the_library(sentencepiece: ModelDescription, ids: list[int]) -> None:
    """If all characters are complete, our text equals the library's."""
    expected = build_tokenizer(sentencepiece).decode(ids, skip_special_tokens=True)
    text = load_tokenizer(sentencepiece).decode(ids)
    assert text == expected or ("\ufffd" in expected and "\ufffd" in text)


def test_a_folders_tokenizer_is_the_same(tmp_path: Path, sentencepiece: ModelDescription) -> None:
    """tokenizer.json gives the tokenizer that it was saved from, without its truncation."""
    backend = build_tokenizer(sentencepiece)
    backend.enable_truncation(3)
    folder = write_folder(tmp_path, tokenizer=backend.to_str())
    ours, theirs = load_tokenizer(describe(folder)), load_tokenizer(sentencepiece)
    text = "hello world hello world"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == text
    assert ours.special_token_ids == theirs.special_token_ids


_WITHOUT_DECODER = json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}})


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "not valid JSON"),
        ("{}", "cannot be read as a tokenizer"),
        ('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}', "cannot be read as a tokenizer"),
        (_WITHOUT_DECODER, "the decoder is missing"),
        (_WITHOUT_DECODER[:-1] + ', "decoder": {"type": "WordPiece", "prefix": "#", "cleanup": true}}', "WordPiece"),
    ],
)
def test_a_damaged_tokenizer_file_is_one_line(tmp_path: Path, content: str, problem: str) -> None:
    """A tokenizer.json that is damaged, or has an unknown decoder, is refused."""
    description = describe(write_folder(tmp_path, tokenizer=content))
    with pytest.raises(ModelError, match=problem) as caught:
        load_tokenizer(description)
    assert "\n" not in str(caught.value)


_BYTE_LEVEL: dict[str, object] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": ["<|begin|>", *"123abĠ", "12", "123", "Ġa"],
    "tokenizer.ggml.token_type": [3] + [1] * 9,
    "tokenizer.ggml.merges": ["1 2", "12 3", "Ġ a"],
}


def _byte_level(sentencepiece: ModelDescription, **changes: object) -> Tokenizer:
    metadata = _BYTE_LEVEL | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return load_tokenizer(replace(sentencepiece, tokenizer_metadata=metadata, bos_token_id=0))


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("llama-bpe", ["<|begin|>", "123", "12", "Ġa"]),
        ("qwen2", ["1", "2", "3", "1", "2", "Ġa"]),
        ("gpt-2", ["123", "12", "Ġa"]),
        ("smollm", ["1", "2", "3", "1", "2", "Ġa"]),
        ("dbrx", ["123", "12", "Ġa"]),
        ("gpt-4o", ["123", "12", "Ġa"]),
        ("tekken", ["<|begin|>", "1", "2", "3", "1", "2", "Ġa"]),
    ],
)
def test_each_pre_tokenizer_splits_digits_its_own_way(
    sentencepiece: ModelDescription, pre: str, expected: list[str]
) -> None:
    """Splits differ in how many digits form a word; only Llama 3's and Mistral's prompts begin with bos."""
    tokens: Any = _BYTE_LEVEL["tokenizer.ggml.tokens"]
    ids = _byte_level(sentencepiece, pre=pre).encode("12312 a")
    assert [tokens[token_id] for token_id in ids] == expected


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("qwen2", ["aB", "'s", "ab"]),
        ("gpt-4o", ["a", "B's", "ab"]),
        ("tekken", ["a", "B", "'s", "ab"]),
    ],
)
def test_each_pre_tokenizer_splits_words_its_own_way(
    sentencepiece: ModelDescription, pre: str, expected: list[str]
) -> None:
    """GPT-4o and Mistral split words at capitals, and only GPT-4o keeps a contraction with its word."""
    tokens = [*"aBbs'", "aB", "ab", "B'", "B's", "'s"]
    merges = ["a B", "a b", "B '", "B' s", "' s"]
    changes = {"tokens": tokens, "token_type": [1] * len(tokens), "merges": merges, "add_bos_token": False}
    ids = _byte_level(sentencepiece, pre=pre, **changes).encode("aB'sab")
    assert [tokens[token_id] for token_id in ids] == expected


def test_user_defined_pieces_go_first_in_gemmas_vocabulary(sentencepiece: ModelDescription) -> None:
    """If no space is added before a text, runs of spaces and line ends become the vocabulary's pieces."""
    tokens = [*SENTENCEPIECE_TOKENS, "▁▁", "▁▁▁", "\n\n"]
    metadata = {
        **sentencepiece.tokenizer_metadata,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [*SENTENCEPIECE_TYPES, 4, 4, 4],
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
    }
    tokenizer = load_tokenizer(replace(sentencepiece, tokenizer_metadata=metadata))
    text = "h   h\n\n  h"
    ids = tokenizer.encode(text)
    assert [tokens[token_id] for token_id in ids] == ["h", "▁▁▁", "h", "\n\n", "▁▁", "h"]
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"pre": "mystery"}, "pre-tokenizer 'mystery' is not supported; supported: default, gpt-2"),
        ({"model": "t5"}, "tokenizer 't5' is not supported; supported: gpt2, llama"),
        ({"merges": ["1 z"]}, "is not made of tokens"),
        ({"merges": ["12"]}, "is not made of tokens"),
        ({"merges": None}, "merges is missing"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "are the same"),
        ({"tokens": []}, "empty"),
        ({"token_type": [1]}, "types"),
        ({"add_bos_token": "yes"}, "add_bos_token must be true or false"),
    ],
)
def test_damaged_tokenizer_metadata_is_one_line(
    sentencepiece: ModelDescription, changes: dict[str, object], problem: str
) -> None:
    """Inconsistent vocabularies and merges are refused by name."""
    with pytest.raises(ModelError, match=problem):
        _byte_level(sentencepiece, **changes)


def test_models_of_one_tokenizer_have_one_digest(tmp_path: Path) -> None:
    """The digest follows the tokenizer alone, not the path or the weights; without a tokenizer it is empty."""
    one, same = (describe(write_folder(tmp_path / name, tokenizer='{"a": 1}')) for name in ("one", "same"))
    other = describe(write_folder(tmp_path / "other", tokenizer='{"a": 2}'))
    assert tokenizer_digest(one) == tokenizer_digest(same) != tokenizer_digest(other)
    packed = describe(write_gguf(tmp_path / "a.gguf"))
    larger = describe(write_gguf(tmp_path / "b.gguf", tiny_config(num_layers=1)))
    assert tokenizer_digest(packed) == tokenizer_digest(larger) != tokenizer_digest(one)
    changed = replace(packed, tokenizer_metadata={**packed.tokenizer_metadata, "tokenizer.ggml.eos_token_id": 3})
    assert tokenizer_digest(changed) != tokenizer_digest(packed)
    (one.path / "tokenizer.json").unlink()
    assert tokenizer_digest(one) == ""
