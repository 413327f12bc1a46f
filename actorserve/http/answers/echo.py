"""A prompt as the beginning of its answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from actorserve.http.answers.detokenizer import Detokenizer
from actorserve.model_files.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt's text, and where each of its tokens begins in it, in characters.

    ``is_all``: the answer is the prompt alone.
    """

    text: str
    offsets: tuple[int, ...]
    is_all: bool = False


def make_echo(tokenizer: Tokenizer, token_ids: Sequence[int], *, is_all: bool = False) -> Echo:
    """Takes a few milliseconds for a long prompt.

    Special tokens are shown as their text, except those that the tokenizer puts before every text. A character that the
    prompt does not finish belongs to the output.
    """
    added = tokenizer.encode("")
    num_hidden = len(added) if list(token_ids[: len(added)]) == added else 0
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    texts: list[str] = []
    offsets = [0] * num_hidden
    num_chars = 0
    for token_id in token_ids[num_hidden:]:
        offsets.append(num_chars)
        texts.append(detokenizer.push(token_id))
        num_chars += len(texts[-1])
    return Echo("".join(texts), tuple(offsets), is_all)
