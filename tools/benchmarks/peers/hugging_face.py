"""transformers in float32 as a peer, with its own cache. Options: ``model`` (a GGUF file or a folder).

Its weights are random: transformers needs another package to read GGUF files, and speed does not depend on weights.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from tools.benchmarks.peers.protocol import BlockBudget, serve

_FIRST_TOKEN = 100  # any ordinary token ids will do


class HuggingFacePeer:
    """Implements ``protocol.Peer``. A prompt is computed in one piece; a batch's requests share one cache."""

    def __init__(self, path: Path, budget: BlockBudget) -> None:
        torch.set_num_threads(budget.num_threads)
        folder, gguf = (path, None) if path.is_dir() else (path.parent, path.name)
        config = AutoConfig.from_pretrained(folder, **({"gguf_file": gguf} if gguf else {}))
        self._model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        self._model.eval()
        self._budget = budget

    @torch.inference_mode()
    def prefill(self, num_tokens: int) -> float:
        token_ids = torch.arange(_FIRST_TOKEN, _FIRST_TOKEN + num_tokens)[None]
        began = time.perf_counter()
        self._model(token_ids, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1)
        return time.perf_counter() - began

    @torch.inference_mode()
    def decode(self, batch: int, steps: int) -> float:
        cache = DynamicCache()
        context = torch.arange(_FIRST_TOKEN, _FIRST_TOKEN + self._budget.context_tokens)[None]
        self._model(context, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.batch_repeat_interleave(batch)
        token_ids = torch.arange(_FIRST_TOKEN, _FIRST_TOKEN + batch)[:, None]
        began = time.perf_counter()
        for _ in range(steps):
            self._model(token_ids, past_key_values=cache, use_cache=True)
        return time.perf_counter() - began


def _make(options: dict[str, Any], budget: BlockBudget) -> HuggingFacePeer:
    return HuggingFacePeer(Path(options["model"]), budget)


if __name__ == "__main__":
    sys.exit(serve(_make, (OSError, ValueError)))
