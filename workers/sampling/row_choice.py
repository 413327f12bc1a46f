"""Choosing tokens on a CPU, one row after the other, by the rules of ``workers.sampling.token_choice``.

On a CPU the time goes into passes over the vocabulary. So a row is narrowed to its candidates as early as possible: a
grammar and ``top_k`` narrow it before any weight is computed. A row's candidates depend on that row alone, so their
layout does, too, and its token has the same bits in any batch.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.sampling.grammars import Masks
from workers.sampling.token_choice import WEIGHT_BITS, Rule, weigh

Bools = NDArray[np.bool_]


def choose_by_row(logits: Tensor, rules: Sequence[Rule], masks: Masks | None = None) -> list[int]:
    """The token of each row of ``logits`` [B, vocab] float32 on the CPU, by its rule.

    ``masks``: only the tokens that they allow can be chosen in their rows. A row without a finite maximum gets the
    token that a greedy choice gives.
    """
    allowed = {} if masks is None else _unpack(masks, logits.shape[1])
    rows = logits.numpy()
    return [_choose(rows[row], rule, allowed.get(row)) for row, rule in enumerate(rules)]


def _unpack(masks: Masks, vocab_size: int) -> Mapping[int, Bools]:
    """For each masked row, which tokens are allowed, [vocab_size]."""
    allowed = np.unpackbits(masks.allowed, axis=1, count=vocab_size, bitorder="little").view(np.bool_)
    return dict(zip(masks.rows, allowed, strict=True))


def _choose(logits: NDArray[np.float32], rule: Rule, allowed: Bools | None) -> int:
    candidates = _Candidates(logits)
    if allowed is not None:
        candidates.keep(allowed)
    first = int(candidates.logits.argmax())
    best = float(candidates.logits[first])
    if rule.temperature <= 0.0 or not np.isfinite(best):
        return candidates.token_id(first)
    if 0 < rule.top_k < len(candidates.logits):
        last = len(candidates.logits) - rule.top_k
        candidates.keep(candidates.logits >= np.partition(candidates.logits, last)[last])
    weights = weigh(torch.from_numpy(candidates.logits), best, rule.temperature).numpy()
    if rule.min_p > 0.0:
        weights = weights[candidates.keep(weights >= int(rule.min_p * 2.0**WEIGHT_BITS))]
    if rule.top_p < 1.0:
        weights = weights[candidates.keep(weights >= _least_of_the_best(weights, rule.top_p))]
    cumulative = _cumulative(weights)
    total = int(cumulative[-1])
    target = min(int(rule.uniform * total), total - 1)
    return candidates.token_id(int(np.searchsorted(cumulative, target, side="right")))


class _Candidates:
    """The tokens that can still be chosen, in order of their ids, and their logits."""

    def __init__(self, logits: NDArray[np.float32]) -> None:
        self.logits = logits
        self._token_ids: NDArray[np.int64] | None = None  # None: all tokens

    def keep(self, which: Bools) -> NDArray[np.int64]:
        """Keep these candidates. Returns their positions among the earlier ones."""
        positions = np.flatnonzero(which)
        self._token_ids = positions if self._token_ids is None else self._token_ids[positions]
        self.logits = self.logits[positions]
        return positions

    def token_id(self, position: int) -> int:
        return position if self._token_ids is None else int(self._token_ids[position])


def _least_of_the_best(weights: NDArray[np.int64], top_p: float) -> int:
    """The least weight among the greatest weights that first reach ``top_p`` of the sum."""
    total = int(weights.sum())
    wanted = max(1, min(total, int(np.ceil(top_p * total))))
    # All weights up to this bound together are at most ``total - wanted``, so the others reach ``wanted``. A language
    # model leaves some hundreds of tokens above it, which are quickly sorted.
    falling = np.sort(weights[weights > (total - wanted) // len(weights)])[::-1].copy()
    return int(falling[np.searchsorted(_cumulative(falling), wanted)])


def _cumulative(weights: NDArray[np.int64]) -> NDArray[np.int64]:
    sums: NDArray[np.int64] = torch.from_numpy(weights).cumsum(0).numpy()  # numpy takes several times as long
    return sums
