"""Log-probabilities of chosen and best tokens, from the model's raw logits.

As in ``workers.sampling.token_choice`` the normalising sum is a sum of integers, so a row's log-probabilities have the
same bits in any batch. Its logarithm is taken on the host.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from actorserve.core.messages import TokenLogprobs
from workers.sampling.token_choice import WEIGHT_BITS, passes, weigh

LEAST_LOGPROB = -9999.0  # as OpenAI's API says of very unlikely tokens; JSON has no infinity


def read_logprobs(logits: Tensor, chosen: Sequence[int], num_best: Sequence[int]) -> list[TokenLogprobs]:
    """Log-softmax of each row of ``logits`` [B, vocab] float32 at its ``chosen`` and its ``num_best`` best tokens.

    The best token comes first, among equals the lower id. No value is below ``LEAST_LOGPROB``, which also replaces NaN.
    """
    result: list[TokenLogprobs] = []
    for rows, part in passes(logits, range(logits.shape[0])):
        count = min(max(num_best[row] for row in rows), logits.shape[1])
        best = part.amax(-1, keepdim=True)
        total = weigh(part, best, torch.ones_like(best)).sum(-1, keepdim=True)
        tokens = torch.tensor([[chosen[row]] for row in rows], device=part.device)
        top_tokens = _best_tokens(part, count) if count else tokens[:, :0]
        wanted = torch.cat((tokens, top_tokens), -1)
        columns = (best.double(), total.double(), part.gather(-1, wanted).double(), top_tokens.double())
        for row, values in zip(rows, torch.cat(columns, -1).tolist(), strict=True):
            result.append(_logprobs(values[0], values[1], values[2 : 3 + count], values[3 + count :], num_best[row]))
    return result


def _logprobs(
    best: float, total: float, logits: Sequence[float], top_tokens: Sequence[float], num_best: int
) -> TokenLogprobs:
    """``logits``: the chosen token's, then those of the best tokens; ``total``: the sum of the integer weights."""
    norm = best + math.log(total * 2.0**-WEIGHT_BITS) if math.isfinite(best) else math.nan
    values = [value - norm for value in logits[: num_best + 1]]
    finite = [value if value >= LEAST_LOGPROB else LEAST_LOGPROB for value in values]
    return TokenLogprobs(finite[0], tuple(int(token) for token in top_tokens[:num_best]), tuple(finite[1:]))


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
