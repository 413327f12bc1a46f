"""Long prompts are refused before they are tokenized, and a prompt that fits is never refused."""

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from actorserve.http.requests import token_floor
from actorserve.http.requests.prompt_encoder import LONG_CHARS, PromptEncoder
from actorserve.http.requests.token_floor import TokenFloor, _counts
from actorserve.model_files.describe import describe
from actorserve.model_files.tokenizer import Tokenizer, load_tokenizer
from tests.http.fakes import TOKENIZER
from tests.model_files.builders import write_gguf

TEXTS = st.text(
    st.one_of(st.characters(), st.sampled_from("aAbB zZ \n\t0019'sdll<|im_end|>\u2581e\u0301\u1100\u1161hello"))
)
MANY = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def default_tokenizer(default_model_path: Path) -> Tokenizer:
    return load_tokenizer(describe(default_model_path))


@pytest.fixture(scope="module")
def default_encoder(default_tokenizer: Tokenizer) -> PromptEncoder:
    return PromptEncoder(default_tokenizer, 8)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(describe(write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")))


@MANY
@given(text=TEXTS, limit=st.integers(1, 80))
def test_a_prompt_that_fits_is_never_refused(
    default_tokenizer: Tokenizer, default_encoder: PromptEncoder, text: str, limit: int
) -> None:
    """A prompt is refused if and only if it has too many tokens, and otherwise its ids are the tokenizer's."""
    ids = tuple(default_tokenizer.encode(text))
    parts = default_tokenizer.encode_in_parts(text)
    assert default_encoder.encode(text, parts, limit) == (ids if len(ids) < limit else None)


@MANY
@given(text=TEXTS, step=st.integers(1, 20))
@pytest.mark.parametrize("name", ["byte level", "sentencepiece"])
def test_the_floor_is_never_above_the_tokens(sentencepiece: Tokenizer, name: str, text: str, step: int) -> None:
    """The lower bound holds for both kinds of vocabularies, in however many steps the text is counted."""
    tokenizer = TOKENIZER if name == "byte level" else sentencepiece
    most = len(tokenizer.encode(text, add_special_tokens=False)) + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_floor, "_STEP_BYTES", step)
        assert not TokenFloor(tokenizer).reaches(text, most)


@pytest.mark.parametrize("part", ["the quick brown fox ", "x", "hello\n", "1234567", "漢字かな", '{"a": [1, 2]}\n'])
def test_a_far_too_long_prompt_is_refused_untokenized(default_tokenizer: Tokenizer, part: str) -> None:
    """600 kB of words, letters, digits, Han or JSON are known to be over 8,192 tokens without making these."""
    text = part * (600_000 // len(part))
    assert TokenFloor(default_tokenizer).reaches(text, 8193)


def test_the_vocabulary_is_read_for_long_texts_only(
    default_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway starts, and reads short texts, without going through the whole vocabulary."""

    def unexpected(_: Tokenizer, token_id: int) -> bytes:
        raise AssertionError(f"token {token_id} was read")

    monkeypatch.setattr(Tokenizer, "token_bytes", unexpected)
    assert not TokenFloor(default_tokenizer).reaches("hello", 8192)


@pytest.mark.parametrize("part", ["x", "the quick brown fox ", " "])
def test_the_floor_of_a_long_text_is_that_of_its_steps(default_tokenizer: Tokenizer, part: str) -> None:
    """No byte and no word is missed or counted twice where two steps of the counting meet."""
    floor = TokenFloor(default_tokenizer)
    text = part * (200_000 // len(part))
    known, unknown = 0, len(text) + 1
    while unknown - known > 1:
        middle = (known + unknown) // 2
        known, unknown = (middle, unknown) if floor.reaches(text, middle) else (known, middle)
    most = list(map(max, *(_counts(default_tokenizer.token_bytes(i)) for i in range(default_tokenizer.vocab_size))))
    assert known == max(-(-count // max(1, of_one)) for count, of_one in zip(_counts(text.encode()), most, strict=True))


def test_reading_stops_when_the_limit_is_passed(default_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that passes the bound and is too long all the same is given up after the part that says so."""
    encoder = PromptEncoder(default_tokenizer, 8)
    monkeypatch.setattr(TokenFloor, "reaches", lambda *_: False)
    text = "the quick brown fox " * 30_000
    num_made = 0

    def parts() -> Iterator[list[int]]:
        nonlocal num_made
        for part in default_tokenizer.encode_in_parts(text):
            num_made += len(part)
            yield part

    assert encoder.encode(text, parts(), 8192) is None
    assert num_made < 20_000


async def test_long_prompts_have_few_slow_threads() -> None:
    """Long prompts are read by at most two threads of low priority, and a short prompt does not wait for them."""
    encoder = PromptEncoder(TOKENIZER, 16)
    release = threading.Event()
    priorities: list[int] = []

    def read() -> None:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        assert release.wait(20)

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for _ in range(5):
            group.create_task(encoder.off_loop(read, LONG_CHARS))
        own = await encoder.off_loop(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), 10)
        while len(priorities) < 2:  # noqa: ASYNC110 - threads cannot wake this test
            await asyncio.sleep(0.01)
        assert len(priorities) == 2
        assert min(priorities) > own or own == 19
        release.set()
    assert len(priorities) == 5
