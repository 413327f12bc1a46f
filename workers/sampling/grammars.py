"""Grammars: which tokens a request may get next, so that its whole output follows its grammar.

A request's grammar state is rebuilt from its output tokens, so a worker can begin in the middle of an answer. The mask
at a position depends on the grammar and the tokens before it alone, not on the batch, the worker or the time.
"""

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from actorserve.core.messages import RequestSpec
from actorserve.model_files.grammars import GrammarCompiler, GrammarError, next_mask
from workers.sampling.grammar_state import GrammarState, Words

_MAX_COMPILED: Final = 32
_NICENESS: Final = 5  # of the threads that prepare grammars, because other requests wait for the threads of the model
_MAX_SHOWN_CHARS: Final = 200

_log = logging.getLogger(__name__)

PreparedGrammar = Future[GrammarState]
"""The state of a request's grammar, which is ready for the request's next token once the future is done."""


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks of the rows of a batch that have a grammar.

    ``allowed``: [len(rows), ceil(vocab_size / 8)] uint8; bit ``t % 8`` of byte ``t // 8`` says whether token t may be
    chosen, and each row of ``rows`` has at least one such token. ``failed`` are rows whose grammar is wrong or met a
    limit, so they get no token.
    """

    rows: tuple[int, ...]
    allowed: NDArray[np.uint8]
    failed: tuple[int, ...]


@dataclass(slots=True)
class _Mask:
    """One mask that another thread makes: for one request at one output position."""

    request_id: str
    prepared: PreparedGrammar
    position: int
    words: Words
    after: Future[None] | None = None  # what uses the same state, and must be done before
    error: BaseException | None = None
    part: Future[None] | None = None

    def make(self) -> None:
        """Whatever a grammar raises fails its request alone. Otherwise it would end this worker, and then each worker
        that continues the request.
        """
        try:
            if self.after is not None:
                self.after.result()
            self.prepared.result().fill(self.position, self.words)
        except BaseException as error:  # noqa: BLE001 - llguidance may raise anything; its panics are no Exception
            self.error = error

    def wait(self) -> bool:
        """Whether the mask could be made. Logs why not."""
        assert self.part is not None
        self.part.result()
        if isinstance(self.error, GrammarError):
            _log.warning("request %s fails: its grammar: %.*r", self.request_id, _MAX_SHOWN_CHARS, str(self.error))
        elif self.error is not None:
            _log.error("request %s fails: the state of its grammar is broken", self.request_id, exc_info=self.error)
        return self.error is None


class PendingMasks:
    """Masks that other threads are making."""

    def __init__(self, rows: Sequence[int], masks: Sequence[_Mask], num_bytes: int) -> None:
        self._rows = rows
        self._masks = masks
        self._num_bytes = num_bytes

    def result(self) -> Masks:
        """Wait for the masks."""
        good, failed = {}, []
        for row, mask in zip(self._rows, self._masks, strict=True):
            if mask.wait():
                good[row] = mask.words.view(np.uint8)[: self._num_bytes]
            else:
                failed.append(row)
        allowed = np.stack(tuple(good.values())) if good else np.empty((0, self._num_bytes), np.uint8)
        return Masks(tuple(good), allowed, tuple(failed))


class Grammars:
    """One object for a worker: its compiled grammars, and the grammar state of each request that has a grammar.

    One thread calls ``prepare``, and another one the other methods. Grammars are compiled in a thread of their own. A
    further thread brings each request's grammar to the end of the output that the request has already, so that a
    request whose grammar is compiled does not wait for the compiling of others. Masks are made in ``num_threads``
    further threads, while the model computes the logits.

    A request's masks cost a bounded amount of work, because ``GrammarCompiler`` sets limits; a request that meets one
    fails. These limits count work and not seconds, because a limit on seconds could be met at one worker and not at
    another.
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
        self._compiling = ThreadPoolExecutor(1, "grammar-compiler", partial(os.nice, _NICENESS))
        self._preparing = ThreadPoolExecutor(1, "grammar-states", partial(os.nice, _NICENESS))
        self._masking = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar-masks")
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._states: dict[str, PreparedGrammar] = {}
        self._ahead: dict[str, _Mask] = {}  # of the positions that come next

    def prepare(self, request: RequestSpec) -> PreparedGrammar | None:
        """Begin to compile the grammar of a request, new or with earlier output. None if the request has none."""
        if not request.sampling.grammar:
            return None
        prepared = PreparedGrammar()
        begin = partial(self._begin_state, request, prepared)
        self._matcher(request.sampling.grammar).add_done_callback(lambda found: self._preparing.submit(begin, found))
        return prepared

    def add(self, request: RequestSpec, prepared: PreparedGrammar | None) -> None:
        """Add a request with what ``prepare`` gave for it; it replaces a request with the same id.

        Raises: ValueError if the request has a grammar that was not prepared.
        """
        self.drop(request.request_id)
        if prepared is not None:
            self._states[request.request_id] = prepared
        elif request.sampling.grammar:
            raise ValueError(f"the grammar of {request.request_id} was not prepared")

    def drop(self, request_id: str) -> None:
        """Forget a request. Unknown ids are ignored."""
        self._states.pop(request_id, None)
        self._ahead.pop(request_id, None)

    def has(self, request_id: str) -> bool:
        """Whether the request was added with a grammar."""
        return request_id in self._states

    def begin(self, request_ids: Sequence[str], positions: Sequence[int]) -> PendingMasks:
        """Begin to make the masks of these rows, of which some may have no grammar, at their output positions.

        The result waits until the grammars of these rows are prepared. No other call but ``prepare`` may come before
        the result. Tokens from a request's position on are forgotten.
        """
        rows = [row for row, request_id in enumerate(request_ids) if request_id in self._states]
        masks, new = [], []
        for row in rows:
            ahead = self._ahead.pop(request_ids[row], None)
            if ahead is not None and ahead.position == positions[row]:
                masks.append(ahead)
                continue
            masks.append(self._mask(request_ids[row], positions[row], after=ahead))
            new.append(masks[-1])
        self._make(new)
        return PendingMasks(rows, masks, -(-self._vocab_size // 8))

    def append(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        """These requests, of which some may have no grammar, got these tokens. ``begin`` was called for them before.

        It begins to make their next masks, because the cores have little else to do until the next step begins.
        """
        next_masks = {}
        for request_id, token_id in zip(request_ids, token_ids, strict=True) if self._states else ():
            prepared = self._states.get(request_id)
            if prepared is not None and prepared.exception() is None:
                state = prepared.result()
                state.append(token_id)
                next_masks[request_id] = self._mask(request_id, state.num_tokens)
        self._make(tuple(next_masks.values()))
        self._ahead |= next_masks

    def _mask(self, request_id: str, position: int, after: _Mask | None = None) -> _Mask:
        words = np.zeros(-(-self._vocab_size // 32), np.uint32)
        return _Mask(request_id, self._states[request_id], position, words, None if after is None else after.part)

    def _make(self, masks: Sequence[_Mask]) -> None:
        for first in range(min(self._num_threads, len(masks))):
            share = masks[first :: self._num_threads]
            part = self._masking.submit(_make_all, share)
            for mask in share:
                mask.part = part

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
        matcher = self._compiler.compile(grammar)
        next_mask(matcher)  # the first one is the costliest one, and copies of the matcher remember what it took
        return matcher

    def _begin_state(self, request: RequestSpec, prepared: PreparedGrammar, compiled: "Future[LLMatcher]") -> None:
        """Make the state of a request whose grammar is compiled, at the end of the request's output.

        That takes up to 64 masks, which would delay a batch. A request without output has no matcher of its own yet,
        because it may wait for long, and a matcher takes memory.
        """
        try:
            state = GrammarState(request, compiled.result(), self._eos_ids)
            if request.output_token_ids:
                state.fill(len(request.output_token_ids), np.zeros(-(-self._vocab_size // 32), np.uint32))
        except BaseException as error:  # noqa: BLE001 - llguidance may raise anything; its panics are no Exception
            prepared.set_exception(error)
        else:
            prepared.set_result(state)


def _make_all(masks: Sequence[_Mask]) -> None:
    for mask in masks:
        mask.make()
