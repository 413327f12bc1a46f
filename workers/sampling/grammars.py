"""Grammars: which tokens a request may get next, so that its whole output follows its grammar.

A request's grammar state is rebuilt from its output tokens, so a worker can begin in the middle of an answer. The mask
at a position depends on the grammar and the tokens before it alone, not on the batch, the worker or the time.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from actorserve.core.messages import RequestSpec
from actorserve.model_files.grammars import GrammarCompiler, GrammarError
from workers.sampling.grammar_state import GrammarState, Words

_MAX_COMPILED = 32


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks of the rows of a batch that have a grammar.

    ``allowed``: [len(rows), ceil(vocab_size / 8)] uint8; bit ``t % 8`` of byte ``t // 8`` says whether token t may be
    chosen, and each row of ``rows`` has at least one such token. ``failed`` are rows whose grammar met a limit, so they
    get no token.
    """

    rows: tuple[int, ...]
    allowed: NDArray[np.uint8]
    failed: tuple[int, ...]


class PendingMasks:
    """Masks that other threads are making."""

    def __init__(self, rows: Sequence[int], words: Words, num_bytes: int) -> None:
        self._rows = rows
        self._words = words
        self._num_bytes = num_bytes
        self._parts: list[Future[list[int]]] = []

    def add(self, part: Future[list[int]]) -> None:
        self._parts.append(part)

    def result(self) -> Masks:
        """Wait for the masks."""
        failed = {index for part in self._parts for index in part.result()}
        good = [index for index in range(len(self._rows)) if index not in failed]
        allowed = self._words.view(np.uint8)[:, : self._num_bytes]
        return Masks(
            tuple(self._rows[index] for index in good),
            allowed[good],
            tuple(self._rows[index] for index in sorted(failed)),
        )


class Grammars:
    """One object for a worker: its compiled grammars, and the grammar state of each request that has a grammar.

    One thread calls the methods. A grammar is compiled in another thread from the time when its request is added. Masks
    are made in ``num_threads`` further threads, while the model computes the logits.
    """

    def __init__(
        self, load: Callable[[], GrammarCompiler], vocab_size: int, eos_ids: Sequence[int], num_threads: int = 1
    ) -> None:
        """``load`` makes the compiler when the first grammar comes, because it takes time and memory."""
        self._load = load
        self._vocab_size = vocab_size
        self._eos_ids = tuple(token_id for token_id in eos_ids if token_id < vocab_size)
        self._num_threads = num_threads
        self._compiler: GrammarCompiler | None = None
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammar-compiler")
        self._masking = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar-masks")
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._states: dict[str, GrammarState] = {}

    def add(self, request: RequestSpec) -> None:
        """Add a request, new or with earlier output; it replaces a request with the same id."""
        self.drop(request.request_id)
        if request.sampling.grammar:
            compiled = self._matcher(request.sampling.grammar)
            self._states[request.request_id] = GrammarState(request, compiled, self._eos_ids)

    def drop(self, request_id: str) -> None:
        """Forget a request. Unknown ids are ignored."""
        self._states.pop(request_id, None)

    def begin(self, request_ids: Sequence[str], positions: Sequence[int]) -> PendingMasks:
        """Begin to make the masks of these rows, of which some may have no grammar, at their output positions.

        No other call may come before the result. Tokens from a request's position on are forgotten.
        """
        rows = [row for row, request_id in enumerate(request_ids) if request_id in self._states]
        words = np.zeros((len(rows), -(-self._vocab_size // 32)), np.uint32)
        pending = PendingMasks(rows, words, -(-self._vocab_size // 8))
        jobs = [(index, self._states[request_ids[row]], positions[row], words[index]) for index, row in enumerate(rows)]
        for first in range(min(self._num_threads, len(jobs))):
            pending.add(self._masking.submit(_fill, jobs[first :: self._num_threads]))
        return pending

    def append(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        """These requests, of which some may have no grammar, got these tokens."""
        if self._states:
            for request_id, token_id in zip(request_ids, token_ids, strict=True):
                state = self._states.get(request_id)
                if state is not None:
                    state.append(token_id)

    def _matcher(self, grammar: str) -> "Future[LLMatcher]":
        known = self._compiled.get(grammar)
        if known is None:
            known = self._compiled[grammar] = self._compiling.submit(self._compile, grammar)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return known

    def _compile(self, grammar: str) -> LLMatcher:
        if self._compiler is None:
            self._compiler = self._load()
        return self._compiler.compile(grammar)


def _fill(jobs: Sequence[tuple[int, GrammarState, int, Words]]) -> list[int]:
    """Make these masks. Returns the indexes of those that could not be made."""
    failed = []
    for index, state, position, words in jobs:
        try:
            state.fill(position, words)
        except GrammarError:
            failed.append(index)
    return failed
