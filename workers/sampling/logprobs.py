"""Log-probabilities of chosen and best tokens, from the model's raw logits.

As in ``workers.sampling.token_choice`` the normalising sum is a sum of integers, so a row's log-probabilities have the
same bits in any batch. Its logarithm is taken on the host.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from actorserve.core.messages import PromptLogprobs, TokenLogprobs
from workers.sampling.token_choice import WEIGHT_BITS, passes, weigh

LEAST_LOGPROB = -9999.0  # as OpenAI's API says of very unlikely tokens; JSON has no infinity


def read_logprobs(logits: Tensor, chosen: Sequence[int], num_best: Sequence[int]) -> list[TokenLogprobs]:
    """Log-softmax of each row of ``logits`` [B, vocab] float32 at its ``chosen`` and its ``num_best`` best tokens.

    The best token comes first, among equals the lower id. No value is below ``LEAST_LOGPROB``, which also replaces NaN.
    """
    result: list[TokenLogprobs] = []
    for rows, part in passes(logits, range(logits.shape[0])):
        tokens = torch.tensor([[chosen[row]] for row in rows], device=part.device)
        found = _read(part, tokens, min(max(num_best[row] for row in rows), logits.shape[1]))
        for row, (values, top_tokens) in zip(rows, found, strict=True):
            count = num_best[row]
            result.append(TokenLogprobs(values[0], tuple(top_tokens[:count]), tuple(values[1 : 1 + count])))
    return result


def score_tokens(logits: Tensor, token_ids: Sequence[int], num_best: int) -> PromptLogprobs:
    """What the rows of ``logits`` [T, vocab] float32 say of the T tokens that follow them in a prompt.

    ``num_best`` of the result is smaller than asked for if the vocabulary is smaller. Values are as in
    ``read_logprobs``, so each token's entries have the same bits in any chunk.
    """
    num_best = min(num_best, logits.shape[1])
    columns: tuple[list[int], list[float], list[int]] = ([], [], [])
    for rows, part in passes(logits, range(logits.shape[0])):
        tokens = torch.tensor([[token_ids[row]] for row in rows], device=part.device)
        ranks = _rank_of(part, tokens).tolist()
        for row, rank, (values, top_tokens) in zip(rows, ranks, _read(part, tokens, num_best), strict=True):
            columns[0].extend((token_ids[row], *top_tokens))
            columns[1].extend(values)
            columns[2].extend((rank, *range(1, num_best + 1)))
    return PromptLogprobs(num_best, tuple(columns[0]), tuple(columns[1]), tuple(columns[2]))


def _read(logits: Tensor, tokens: Tensor, num_best: int) -> list[tuple[list[float], list[int]]]:
    """For each row of ``logits`` [R, vocab]: the log-probabilities of its token in ``tokens`` [R, 1] and of the best
    tokens, and these best tokens.
    """
    best = logits.amax(-1, keepdim=True)
    total = weigh(logits, best, torch.ones_like(best)).sum(-1, keepdim=True)
    top_tokens = _best_tokens(logits, num_best) if num_best else tokens[:, :0]
    wanted = logits.gather(-1, torch.cat((tokens, top_tokens), -1))
    rows = torch.cat((best.double(), total.double(), wanted.double()), -1).tolist()
    return [
        (_log_softmax(row[0], row[1], row[2:]), row_tokens)
        for row, row_tokens in zip(rows, top_tokens.tolist(), strict=True)
    ]


def _log_softmax(best: float, total: float, logits: Sequence[float]) -> list[float]:
    """``best`` is the row's greatest logit, and ``total`` the sum of its integer weights."""
    norm = best + math.log(total * 2.0**-WEIGHT_BITS) if math.isfinite(best) else math.nan
    return [value - norm if value - norm >= LEAST_LOGPROB else LEAST_LOGPROB for value in logits]


def _rank_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """The rank [R] of each row's token in ``tokens`` [R, 1], counted from 1; among equals the lower id comes first."""
    own = logits.gather(-1, tokens)
    earlier_ids = torch.arange(logits.shape[-1], device=logits.device) < tokens
    return ((logits > own) | ((logits == own) & earlier_ids)).sum(-1) + 1


def _best_tokens(logits: Tensor, count: int) -> Tensor:
    """The ``count`` best tokens of each row [R, count], ties by token id.

    ``topk`` promises no order of equal elements. So the found tokens are sorted here, which is enough unless ``topk``
    left out equals of the last one.
    """
    found, tokens = logits.topk(count, dim=-1)
    last = found[:, -1:]
    if bool(((logits == last).sum(-1) != (found == last).sum(-1)).any()):
        return _ranks(logits, None).topk(count, dim=-1).indices
    return tokens.gather(-1, _ranks(found, tokens).argsort(-1, descending=True))


def _ranks(logits: Tensor, tokens: Tensor | None) -> Tensor:
    """Unique int64 ranks, of the shape of ``logits``: higher for a greater logit, then for a lower token id.

    The upper half is the float's bits, mapped so that integers compare like the floats; the lower half is the
    complement of the id.
    """
    bits = (logits + 0.0).view(torch.int32)  # adding 0 turns -0.0 into 0.0, which it equals
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    if tokens is None:
        tokens = torch.arange(logits.shape[-1], device=logits.device)
    return ordered.bitwise_left_shift(32) | (2**32 - 1 - tokens)
