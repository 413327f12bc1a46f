"""Choosing tokens by inverse CDF, so that a row's token depends only on that row's logits and its uniform number.

Float sums depend on the order of their terms, and a library's order depends on the shape of the whole batch. So
probabilities are integers: ``floor(exp((x - max) / temperature) * 2**42)``. Their sums are exact in any order, and the
same for any number of candidates, rows or threads. The exponential is elementwise. On a CPU its vector kernels may
treat the last elements of a thread's share differently, so there rows run one at a time, always in the same layout.

Thresholds decide which tokens are kept, so tokens of equal logits are kept or dropped together.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workers.sampling.grammars import Masks
from workers.sampling.logit_edits import apply_masks

RULE_FIELDS = 5  # of a Rule
WEIGHT_BITS = 42  # the best token's weight is 2**42, so sums over 2**20 tokens stay below 2**63
_MAX_ROWS_PER_PASS = 32  # bounds scratch memory on a GPU: 32 rows x 128k tokens x 8 bytes is 34 MB per temporary
_FIRST_CANDIDATES = 128  # nearly always enough for a language model's top_p; otherwise eight times as many are tried


class Rule(NamedTuple):
    """How to choose one row's token: fields of ``SamplingParams``, and the uniform number."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    uniform: float

    @property
    def cuts_tail(self) -> bool:
        """Whether tokens must be ranked, which costs more than one pass over them."""
        return self.top_k > 0 or self.top_p < 1.0


def passes(logits: Tensor, rows: Sequence[int]) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Split ``rows`` of ``logits`` [B, vocab] into passes: (positions within ``rows``, those rows' logits [R, vocab]).

    On a CPU a pass has one row, so that its bits do not depend on other rows and its temporaries stay in the cache.
    """
    if logits.device.type == "cpu":
        for position, row in enumerate(rows):
            yield (position,), logits[row : row + 1]
        return
    for start in range(0, len(rows), _MAX_ROWS_PER_PASS):
        positions = range(start, min(start + _MAX_ROWS_PER_PASS, len(rows)))
        index = torch.tensor([rows[position] for position in positions], device=logits.device)
        yield positions, logits.index_select(0, index)


def weigh(logits: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """Integer weights [R, vocab] int64 of ``logits`` [R, vocab], given the rows' maxima and temperatures [R, 1]."""
    scaled = logits.double().sub_(best).div_(temperature)
    return scaled.exp_().mul_(2.0**WEIGHT_BITS).to(torch.int64)


def choose_natively(logits: Tensor, rules: Sequence[Rule], masks: Masks | None) -> list[int]:
    """``choose`` by our own kernel (``workers/native/sampling.cpp``), for contiguous logits on the CPU."""
    mask_of = [-1] * len(rules)
    allowed = torch.empty((0, -(-logits.shape[1] // 8)), dtype=torch.uint8)
    if masks is not None and masks.rows:
        allowed = torch.from_numpy(masks.allowed)
        for index, row in enumerate(masks.rows):
            mask_of[row] = index
    fields = torch.tensor(rules, dtype=torch.float64)
    chosen: list[int] = torch.ops.actorserve.choose(logits, fields, torch.tensor(mask_of), allowed).tolist()
    return chosen


def choose(logits: Tensor, rules: Sequence[Rule], masks: Masks | None) -> list[int]:
    """The token of each row of ``logits`` [B, vocab] float32, by its rule. Blocks until the tokens are on the host.

    It edits the logits of rows that have a mask.

    Per row, as vLLM orders it: temperature, min_p (tokens below ``min_p`` times the best one's probability go), top_k
    (tokens below the k-th best go), top_p (of what is left, renormalised: the best tokens that first reach ``top_p``,
    at least one, with all equals of the last). The token is then the first, in order of ids, at which the cumulative
    weight exceeds ``uniform`` times the total. At temperature 0 it is the best token, the lowest id among equals.

    A row with NaN, or without a finite maximum, gets what a greedy choice gives, because an error would crash one
    worker after another as the request is restarted.
    """
    if masks is not None and masks.rows:
        apply_masks(logits, masks)
    greedy = [row for row, rule in enumerate(rules) if rule.temperature <= 0.0]
    sampled = [row for row, rule in enumerate(rules) if rule.temperature > 0.0]
    parts = []
    if greedy:
        parts.append(_choose_greedy(logits, greedy))
    if sampled:
        parts.append(_choose_sampled(logits, sampled, [rules[row] for row in sampled]))
    token_ids = [0] * len(rules)
    for row, token_id in zip((*greedy, *sampled), torch.cat(parts).tolist(), strict=True):
        token_ids[row] = token_id
    return token_ids


def _choose_greedy(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """The best token of each row, the lowest id among equals: [len(rows)] int64."""
    if len(rows) < logits.shape[0]:
        logits = logits.index_select(0, torch.tensor(rows, device=logits.device))
    return logits.argmax(-1)


def _choose_sampled(logits: Tensor, rows: Sequence[int], rules: Sequence[Rule]) -> Tensor:
    """Sample ``rows`` of ``logits`` [B, vocab] float32, each by its rule: [len(rows)] int64."""
    chosen = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    plain = [i for i, rule in enumerate(rules) if not rule.cuts_tail]
    tailed = [i for i, rule in enumerate(rules) if rule.cuts_tail]
    for group in (plain, tailed):
        for positions, part in passes(logits, [rows[i] for i in group]):
            members = [group[position] for position in positions]
            chosen[members] = _sample(part, [rules[i] for i in members])
    return chosen


def _sample(logits: Tensor, rules: Sequence[Rule]) -> Tensor:
    argmax = logits.argmax(-1, keepdim=True)
    best = logits.gather(-1, argmax)
    weights = weigh(logits, best, _column(logits, [rule.temperature for rule in rules]))
    if any(rule.min_p > 0.0 for rule in rules):
        least = _column(logits, [rule.min_p * 2.0**WEIGHT_BITS for rule in rules]).to(torch.int64)
        weights.masked_fill_(weights < least, 0)
    if any(rule.cuts_tail for rule in rules):
        weights.masked_fill_(logits < _tail_thresholds(logits, weights, rules), 0)
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    target = (_column(logits, [rule.uniform for rule in rules]) * total).to(torch.int64).minimum(total - 1)
    token = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[1] - 1)
    return torch.where(best.isfinite(), token, argmax).squeeze(-1)


def _tail_thresholds(logits: Tensor, weights: Tensor, rules: Sequence[Rule]) -> Tensor:
    """The least logit that top_k and top_p keep, [R, 1]; ``weights``: zero for tokens that min_p dropped.

    It ranks only as many candidates as it needs. Sums are exact, so their number does not change the result.
    """
    vocab_size = logits.shape[1]
    top_k = [min(rule.top_k, vocab_size) for rule in rules]
    by_mass = any(rule.top_p < 1.0 for rule in rules)
    num_candidates = min(max(*top_k, _FIRST_CANDIDATES if by_mass else 1), vocab_size)
    ranked, order = _rank(logits, num_candidates)
    last = torch.tensor([[max(k, 1) - 1] for k in top_k], device=logits.device)
    unlimited = torch.tensor([[k == 0] for k in top_k], device=logits.device)
    by_rank = ranked.gather(-1, last).masked_fill_(unlimited, float("-inf"))
    if not by_mass:
        return by_rank

    top_p = _column(logits, [rule.top_p for rule in rules])
    allowed = weights.masked_fill(logits < by_rank, 0) if any(top_k) else weights
    total = allowed.sum(-1, keepdim=True)
    wanted = (top_p * total).ceil_().to(torch.int64).minimum(total).clamp_(min=1)
    while True:
        # Candidates beyond top_k may count here, because ``by_rank`` decides if the threshold lies among them.
        num_short = (weights.gather(-1, order).cumsum_(-1) < wanted).sum(-1, keepdim=True)
        found = num_short < num_candidates
        if num_candidates == vocab_size or not bool((~found & unlimited & (top_p < 1.0)).any()):
            break
        num_candidates = min(num_candidates * 8, vocab_size)
        ranked, order = _rank(logits, num_candidates)
    by_sum = ranked.gather(-1, num_short.clamp_(max=num_candidates - 1))
    by_sum.masked_fill_(~found | (top_p >= 1.0), float("-inf"))
    return torch.maximum(by_rank, by_sum)


def _rank(logits: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
    """The ``num_candidates`` best logits in falling order, and their tokens; equal logits in any order."""
    if num_candidates * 4 > logits.shape[1]:
        ranked, order = logits.sort(-1, descending=True)
        return ranked[:, :num_candidates], order[:, :num_candidates]
    ranked, order = logits.topk(num_candidates, dim=-1)
    return ranked, order


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(-1)
