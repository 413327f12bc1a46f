"""llama.cpp as a peer, through llama-cpp-python's low-level interface. Run by the Python of its build.

Options: ``model`` (a GGUF file), ``flash_attention``. KV is float16, the default. Each request has a KV stream of its
own, so that attention reads no other request's KV.
"""

import ctypes
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from llama_cpp import llama_cpp

from tools.benchmarks.peers.protocol import CHUNK_TOKENS, BlockBudget, serve

_FIRST_TOKEN = 100  # any ordinary token ids will do


class LlamaError(Exception):
    """llama.cpp failed; the text says at what."""


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _no_log(_level: int, _text: bytes, _data: ctypes.c_void_p) -> None:
    pass


class _Context:
    """A context for ``num_requests`` of ``num_tokens`` each."""

    def __init__(self, model: Any, num_requests: int, num_tokens: int, num_threads: int, flash_attention: bool) -> None:
        parameters = llama_cpp.llama_context_default_params()
        # Streams are padded to a multiple of 256.
        parameters.n_ctx = num_requests * (-(-num_tokens // 256) * 256)
        parameters.n_batch = parameters.n_ubatch = CHUNK_TOKENS
        parameters.n_seq_max = num_requests
        parameters.n_threads = parameters.n_threads_batch = num_threads
        parameters.flash_attn_type = int(flash_attention)
        parameters.kv_unified = False
        self._context = llama_cpp.llama_init_from_model(model, parameters)
        if not self._context:
            raise LlamaError("llama.cpp cannot make a context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(CHUNK_TOKENS, 0, 1)

    def decode(self, entries: Sequence[tuple[int, int, int, bool]]) -> None:
        """Compute (token id, position, request, whether its logits are wanted) for each token of one batch."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token_id, position, request, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token_id, position, wanted
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = request
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise LlamaError(f"llama_decode gives {status}")
        llama_cpp.llama_synchronize(self._context)

    def logits(self, num_rows: int, vocab_size: int) -> "np.ndarray[Any, np.dtype[np.float32]]":
        """[num_rows, vocab_size], for the last batch's wanted tokens; valid until the next batch."""
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), shape=(num_rows, vocab_size))

    def prefill(self, num_tokens: int) -> None:
        """Compute a prompt of request 0, whose KV is empty."""
        for start in range(0, num_tokens, CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, num_tokens)
            self.decode([(_FIRST_TOKEN + at, at, 0, at == num_tokens - 1) for at in range(start, end)])

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, False)

    def copy_to(self, request: int) -> None:
        """Give another request a copy of request 0's KV."""
        llama_cpp.llama_memory_seq_cp(self._memory, 0, request, -1, -1)

    def cut(self, request: int, num_tokens: int) -> None:
        """Drop the KV after the first ``num_tokens``."""
        llama_cpp.llama_memory_seq_rm(self._memory, request, num_tokens, -1)


class LlamaPeer:
    """Implements ``protocol.Scorer``."""

    def __init__(self, model_file: str, flash_attention: bool, budget: BlockBudget) -> None:
        llama_cpp.llama_log_set(_no_log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(model_file.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise LlamaError(f"llama.cpp cannot read {model_file}")
        self._budget = budget
        self._flash_attention = flash_attention
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._prompts = self._context(1, max(budget.max_prompt_tokens, 1))
        self._requests = self._context(budget.max_batch, budget.context_tokens + budget.max_steps)
        for start in range(0, budget.context_tokens, CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, budget.context_tokens)
            self._requests.decode([(_FIRST_TOKEN + at, at, 0, at == end - 1) for at in range(start, end)])
        for request in range(1, budget.max_batch):
            self._requests.copy_to(request)

    def prefill(self, num_tokens: int) -> float:
        self._prompts.clear()
        began = time.perf_counter()
        self._prompts.prefill(num_tokens)
        return time.perf_counter() - began

    def decode(self, batch: int, steps: int) -> float:
        context = self._budget.context_tokens
        began = time.perf_counter()
        for step in range(steps):
            self._requests.decode([(_FIRST_TOKEN + number, context + step, number, True) for number in range(batch)])
        seconds = time.perf_counter() - began
        for request in range(batch):
            self._requests.cut(request, context)
        return seconds

    def score(self, token_ids: Sequence[int]) -> float:
        self._prompts.clear()
        nats = 0.0
        for start in range(0, len(token_ids) - 1, CHUNK_TOKENS):
            chunk = token_ids[start : min(start + CHUNK_TOKENS, len(token_ids) - 1)]
            self._prompts.decode([(token_id, start + i, 0, True) for i, token_id in enumerate(chunk)])
            logits = self._prompts.logits(len(chunk), self._vocab_size).astype(np.float64)
            logits -= logits.max(axis=1, keepdims=True)
            following = np.array(token_ids[start + 1 : start + 1 + len(chunk)])
            chosen = logits[np.arange(len(chunk)), following]
            nats += float((np.log(np.exp(logits).sum(axis=1)) - chosen).sum())
        return nats

    def _context(self, num_requests: int, num_tokens: int) -> _Context:
        return _Context(self._model, num_requests, num_tokens, self._budget.num_threads, self._flash_attention)


def _make(options: dict[str, Any], budget: BlockBudget) -> LlamaPeer:
    return LlamaPeer(options["model"], options["flash_attention"], budget)


if __name__ == "__main__":
    sys.exit(serve(_make, (LlamaError,)))
