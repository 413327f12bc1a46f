"""A request's penalised tokens, updated with each token, without a table of the whole vocabulary."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from actorserve.core.messages import RequestSpec


class PenaltyTable:
    """The distinct penalised tokens of one request, as columns that grow.

    The repetition penalty applies to tokens of prompt and output; presence and frequency penalties apply to the output
    alone. Tokens that another worker produced for the request count as output.
    """

    def __init__(self, request: RequestSpec, vocab_size: int) -> None:
        sampling = request.sampling
        self._vocab_size = vocab_size
        self._repetition = sampling.repetition_penalty
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        prompt: Iterable[int] = request.prompt_token_ids if self._repetition != 1.0 else ()
        self._prompt = frozenset(token for token in prompt if 0 <= token < vocab_size)
        self._size = len(self._prompt)
        self._index = {token: index for index, token in enumerate(sorted(self._prompt))}
        self._token_ids = np.fromiter(self._index, np.int64, self._size)
        self._counts = np.zeros(self._size, np.int32)
        self._output: list[int] = []
        for token in request.output_token_ids:
            self.append(token)

    def append(self, token_id: int) -> None:
        """Count one more output token."""
        self._output.append(token_id)
        if not 0 <= token_id < self._vocab_size:
            return
        index = self._index.get(token_id)
        if index is None:
            index = self._size
            self._reserve(index + 1)
            self._index[token_id] = index
            self._token_ids[index] = token_id
            self._counts[index] = 0
            self._size += 1
        self._counts[index] += 1

    def rewind(self, position: int) -> None:
        """Forget output tokens from ``position`` on, because that position is sampled (again).

        Raises: ValueError if tokens before ``position`` are unknown.
        """
        if position > len(self._output):
            raise ValueError(f"output position {position} is sampled, but only {len(self._output)} tokens are known")
        while len(self._output) > position:
            self._uncount(self._output.pop())

    def columns(self) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
        """(token ids, factors that divide positive logits and multiply negative ones, amounts to subtract then)."""
        counts = self._counts[: self._size]
        factors = np.full(self._size, self._repetition, np.float32)
        amounts = counts * self._frequency + (counts > 0) * self._presence
        return self._token_ids[: self._size], factors, amounts.astype(np.float32)

    def _uncount(self, token_id: int) -> None:
        index = self._index.get(token_id)
        if index is None:
            return
        self._counts[index] -= 1
        if self._counts[index] > 0 or token_id in self._prompt:
            return
        self._size -= 1  # the last entry fills the gap
        moved = int(self._token_ids[self._size])
        self._token_ids[index] = moved
        self._counts[index] = self._counts[self._size]
        self._index[moved] = index
        del self._index[token_id]

    def _reserve(self, size: int) -> None:
        if size > len(self._token_ids):
            extra = max(64, size)
            self._token_ids = np.concatenate((self._token_ids, np.zeros(extra, np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(extra, np.int32)))
