"""Turns token ids into text, one at a time, without breaking multi-byte characters."""

import codecs
from collections.abc import Collection, Sequence

from actorserve.model_files.tokenizer import Tokenizer

_MAX_CHARACTER_BYTES = 4


class Detokenizer:
    """Decodes one output. The concatenated results are the text that the output adds to the prompt's text.

    A text's tokens are bytes (``Tokenizer.decode``), so an incremental UTF-8 decoder is the only state. It takes
    constant time per byte, and holds at most three bytes back, until their character is complete or invalid.

    ``prompt_token_ids`` precede the output. Without a prompt (or after special tokens alone) the output
    begins a text, and SentencePiece's first space is removed. After a prompt the space stays, because it separates
    words. A character that the prompt left unfinished belongs to the output.

    Special tokens are skipped, except ``kept_token_ids``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        kept_token_ids: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._skipped = skipped.difference(kept_token_ids)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail = self._tail(prompt_token_ids)
        self._decoder.decode(tail)
        self._strip_next = tokenizer.strips_leading_space and not tail

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token; often empty."""
        if token_id in self._skipped:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._strip_next and data:
            data = data.removeprefix(b" ")
            self._strip_next = False
        return self._decoder.decode(data)

    def finish(self) -> str:
        """No more tokens come: an unfinished character becomes U+FFFD. A second call returns nothing."""
        return self._decoder.decode(b"", final=True)

    def _tail(self, prompt_token_ids: Sequence[int]) -> bytes:
        """The prompt's last bytes, at least its last character. UTF-8 resynchronizes after any cut."""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if len(tail) >= _MAX_CHARACTER_BYTES:
                break
            if token_id not in self._skipped:
                tail = self._tokenizer.token_bytes(token_id) + tail
        return tail
