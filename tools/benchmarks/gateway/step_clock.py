"""When each step's tokens were sent: memory that the sender of tokens shares with their reader.

Step ``k`` sends the same token to every stream, so the token's text tells the reader the step. There are ``NUM_STEPS``
such tokens, which are used in turn.
"""

import mmap
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from actorserve.model_files.tokenizer import Tokenizer
from tools.benchmarks.common.errors import BenchError

NUM_STEPS: Final = 2048
_TIME: Final = struct.Struct("d")


class StepClock:
    """The times of the latest ``NUM_STEPS`` steps, in seconds of ``time.monotonic``, which all processes share."""

    def __init__(self, file: Path) -> None:
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), NUM_STEPS * _TIME.size)

    @staticmethod
    def create(file: Path) -> None:
        file.write_bytes(bytes(NUM_STEPS * _TIME.size))

    def note(self, step: int, now: float) -> None:
        _TIME.pack_into(self._memory, step % NUM_STEPS * _TIME.size, now)

    def sent_s(self, number: int) -> float:
        """When the latest step with this number (modulo ``NUM_STEPS``) was sent."""
        return float(_TIME.unpack_from(self._memory, number * _TIME.size)[0])


def step_tokens(tokenizer: Tokenizer) -> tuple[Sequence[int], Sequence[str]]:
    """``NUM_STEPS`` tokens with different texts of letters, and these texts. Raises: BenchError."""
    tokens: dict[str, int] = {}
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.token_text(token_id)
        if text.isascii() and text.strip().isalpha() and 3 <= len(text) <= 8:
            tokens.setdefault(text, token_id)
            if len(tokens) == NUM_STEPS:
                return list(tokens.values()), list(tokens)
    raise BenchError(f"the model's vocabulary has fewer than {NUM_STEPS} short words")
