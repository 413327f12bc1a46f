"""The Triton kernels of ``workers.sampling.triton_choice``. Importing this module needs the package ``triton``.

A token's key is an integer that orders its logit: 0 for a token that the row's mask forbids, the greatest for NaN.
"""

# mypy: disable-error-code="untyped-decorator"

import triton
import triton.language as tl

_NAN_KEY = tl.constexpr(0xFFFFFFFF)
_INFINITY_KEY = tl.constexpr(0xFF800000)  # of plus infinity
_LEAST_KEY = tl.constexpr(0x007FFFFF)  # of minus infinity
_LAST_TOKEN = tl.constexpr(0xFFFFF)  # of the largest vocabulary, 2**20
_TOKEN_BITS = tl.constexpr(20)
_BEST_WEIGHT = tl.constexpr(4398046511104.0)  # 2**42
_RULE_FIELDS = tl.constexpr(5)
_TEMPERATURE, _TOP_P, _TOP_K, _MIN_P, _UNIFORM = (tl.constexpr(field) for field in range(5))


@triton.jit
def _load_rule(rules: tl.tensor, row: tl.tensor, field: tl.constexpr) -> tl.tensor:
    return tl.load(rules + row * _RULE_FIELDS + field)


@triton.jit
def _load_keys(
    logits: tl.tensor,
    token: tl.tensor,
    exists: tl.tensor,
    mask: tl.tensor,
    allowed: tl.tensor,
    allowed_stride: tl.tensor,
) -> tl.tensor:
    """The keys of these tokens of a row, int64; 0 beyond the row. ``mask``: the row of ``allowed``, or -1."""
    logit = tl.load(logits + token, mask=exists, other=0.0)
    logit = tl.where(logit == 0.0, 0.0, logit)  # zeros of both signs are equal
    bits = logit.to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 0x80000000
    key = tl.where(logit != logit, _NAN_KEY, key)
    byte = tl.load(allowed + mask * allowed_stride + token // 8, mask=exists & (mask >= 0), other=255)
    is_allowed = ((byte.to(tl.int32) >> (token % 8)) & 1) != 0
    return tl.where(exists & is_allowed, key, 0)


@triton.jit
def _logit_of(key: tl.tensor) -> tl.tensor:
    """The logit that a key orders, float32."""
    bits = (key - 0x80000000).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best_of(maxima: tl.tensor, row: tl.tensor, num_groups: tl.tensor, padded_groups: tl.constexpr) -> tl.tensor:
    """The best key of the row and its first token."""
    group = tl.arange(0, padded_groups)
    found = tl.max(tl.load(maxima + row * num_groups + group, mask=group < num_groups, other=0), 0)
    return found >> _TOKEN_BITS, (found & _LAST_TOKEN) ^ _LAST_TOKEN


@triton.jit
def _is_sampled(rules: tl.tensor, row: tl.tensor, best: tl.tensor) -> tl.tensor:
    """Whether the row is sampled; otherwise, or if its best logit is not finite, it gets its best token."""
    return (_load_rule(rules, row, _TEMPERATURE) > 0.0) & (best > _LEAST_KEY) & (best < _INFINITY_KEY)


@triton.jit
def _is_ranked(rules: tl.tensor, row: tl.tensor, vocab_size: tl.tensor) -> tl.tensor:
    top_k = _load_rule(rules, row, _TOP_K)
    return (top_k > 0.0) & (top_k < vocab_size)


@triton.jit
def _share(top_p: tl.tensor, total: tl.tensor) -> tl.tensor:
    """The least sum of weights that the best tokens must reach."""
    wanted = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(wanted, total), 1)


@triton.jit
def find_maxima(
    logits: tl.tensor,
    masks: tl.tensor,
    allowed: tl.tensor,
    maxima: tl.tensor,
    num_candidates: tl.tensor,
    logits_stride: tl.tensor,
    allowed_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_groups: tl.tensor,
    group_tokens: tl.constexpr,
    chunk_groups: tl.constexpr,
) -> None:
    """For each group of tokens: its best key, and in the lower 20 bits the complement of that key's first token."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = chunk * chunk_groups + tl.arange(0, chunk_groups)
    token = group[:, None] * group_tokens + tl.arange(0, group_tokens)[None, :]
    mask = tl.load(masks + row)
    exists = token < vocab_size
    key = _load_keys(logits + row * logits_stride, token, exists, mask, allowed, allowed_stride)
    best = tl.max(tl.where(exists, (key << _TOKEN_BITS) | (token ^ _LAST_TOKEN), 0), 1)
    tl.store(maxima + row * num_groups + group, best, mask=group < num_groups)
    if chunk == 0:
        tl.store(num_candidates + row, 0)


@triton.jit
def weigh(
    logits: tl.tensor,
    rules: tl.tensor,
    masks: tl.tensor,
    allowed: tl.tensor,
    maxima: tl.tensor,
    weights: tl.tensor,
    chunk_sums: tl.tensor,
    logits_stride: tl.tensor,
    allowed_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_groups: tl.tensor,
    num_chunks: tl.tensor,
    padded_groups: tl.constexpr,
    chunk_tokens: tl.constexpr,
) -> None:
    """The integer weights of sampled rows' tokens, and each chunk's sum of them. min_p has dropped the least."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best, _ = _best_of(maxima, row, num_groups, padded_groups)
    if _is_sampled(rules, row, best):
        token = chunk * chunk_tokens + tl.arange(0, chunk_tokens)
        exists = token < vocab_size
        mask = tl.load(masks + row)
        key = _load_keys(logits + row * logits_stride, token, exists, mask, allowed, allowed_stride)
        below = _logit_of(tl.maximum(key, _LEAST_KEY)).to(tl.float64) - _logit_of(best).to(tl.float64)
        scaled = below / _load_rule(rules, row, _TEMPERATURE)
        weight = (tl.exp(scaled) * _BEST_WEIGHT).to(tl.int64)
        least = (_load_rule(rules, row, _MIN_P) * _BEST_WEIGHT).to(tl.int64)
        weight = tl.where((key > _LEAST_KEY) & (weight >= least), weight, 0)
        tl.store(weights + row * vocab_size + token, weight, mask=exists)
        tl.store(chunk_sums + row * num_chunks + chunk, tl.sum(weight, 0))


@triton.jit
def gather_candidates(
    logits: tl.tensor,
    rules: tl.tensor,
    masks: tl.tensor,
    allowed: tl.tensor,
    maxima: tl.tensor,
    weights: tl.tensor,
    chunk_sums: tl.tensor,
    candidates: tl.tensor,
    num_candidates: tl.tensor,
    logits_stride: tl.tensor,
    allowed_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_groups: tl.tensor,
    num_chunks: tl.tensor,
    padded_groups: tl.constexpr,
    padded_chunks: tl.constexpr,
    chunk_tokens: tl.constexpr,
) -> None:
    """Lists the tokens that top_k and top_p may keep, in any order, because only exact sums are taken over them.

    Of the groups' maxima, ``top_k`` are at least the k-th greatest maximum, so the k-th best token is no worse.
    Weights up to ``(total - wanted) / vocab_size`` together are at most ``total - wanted``, so the others suffice.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best, _ = _best_of(maxima, row, num_groups, padded_groups)
    is_ranked = _is_ranked(rules, row, vocab_size)
    top_p = _load_rule(rules, row, _TOP_P)
    if _is_sampled(rules, row, best) & (is_ranked | (top_p < 1.0)):
        token = chunk * chunk_tokens + tl.arange(0, chunk_tokens)
        exists = token < vocab_size
        if is_ranked:
            group = tl.arange(0, padded_groups)
            group_best = tl.load(maxima + row * num_groups + group, mask=group < num_groups, other=0) >> _TOKEN_BITS
            top_k = _load_rule(rules, row, _TOP_K).to(tl.int64)
            lowest = tl.full([], 0, tl.int64)
            for step in range(32):
                tried = lowest | (tl.full([], 1, tl.int64) << (31 - step))
                lowest = tl.where(tl.sum((group_best >= tried).to(tl.int64), 0) >= top_k, tried, lowest)
            mask = tl.load(masks + row)
            key = _load_keys(logits + row * logits_stride, token, exists, mask, allowed, allowed_stride)
            is_candidate = exists & (key >= lowest)
        else:
            number = tl.arange(0, padded_chunks)
            sums = tl.load(chunk_sums + row * num_chunks + number, mask=number < num_chunks, other=0)
            total = tl.sum(sums, 0)
            bound = (total - _share(top_p, total)) // vocab_size
            weight = tl.load(weights + row * vocab_size + token, mask=exists, other=0)
            is_candidate = weight > bound
        counted = is_candidate.to(tl.int32)
        first = tl.atomic_add(num_candidates + row, tl.sum(counted, 0))
        place = first + tl.cumsum(counted, 0) - 1
        tl.store(candidates + row * vocab_size + place, token, mask=is_candidate)


_BY_KEY, _BY_WEIGHT, _BY_TOKEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _sums_from(
    candidates: tl.tensor,
    weights: tl.tensor,
    logits: tl.tensor,
    mask: tl.tensor,
    allowed: tl.tensor,
    allowed_stride: tl.tensor,
    count: tl.tensor,
    lowest: tl.tensor,
    least: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    by: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """Over the candidates with a key from ``lowest`` and a weight from ``least`` on: three sums of their weights, each
    over those whose value is at least ``first``, ``second`` or ``third``. A value is a weight or a token. By key, the
    sums are counts of keys.
    """
    sum1 = tl.full([], 0, tl.int64)
    sum2 = tl.full([], 0, tl.int64)
    sum3 = tl.full([], 0, tl.int64)
    for start in range(0, count, block):
        place = start + tl.arange(0, block)
        exists = place < count
        token = tl.load(candidates + place, mask=exists, other=0)
        key = _load_keys(logits, token, exists, mask, allowed, allowed_stride)
        if by == _BY_KEY:
            value = key
            amount = exists.to(tl.int64)
        else:
            amount = tl.load(weights + token, mask=exists, other=0)
            amount = tl.where((key >= lowest) & (amount >= least), amount, 0)
            value = amount if by == _BY_WEIGHT else token.to(tl.int64)
        sum1 += tl.sum(tl.where(value >= first, amount, 0), 0)
        sum2 += tl.sum(tl.where(value >= second, amount, 0), 0)
        sum3 += tl.sum(tl.where(value >= third, amount, 0), 0)
    return sum1, sum2, sum3


@triton.jit
def _greatest_reaching(
    candidates: tl.tensor,
    weights: tl.tensor,
    logits: tl.tensor,
    mask: tl.tensor,
    allowed: tl.tensor,
    allowed_stride: tl.tensor,
    count: tl.tensor,
    lowest: tl.tensor,
    least: tl.tensor,
    wanted: tl.tensor,
    by: tl.constexpr,
    num_bits: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """The greatest number for which the sum of ``_sums_from`` reaches ``wanted``: two bits in each pass."""
    found = tl.full([], 0, tl.int64)
    for step in range(0, num_bits, 2):
        one = tl.full([], 1, tl.int64) << (num_bits - 2 - step)
        sum1, sum2, sum3 = _sums_from(
            candidates,
            weights,
            logits,
            mask,
            allowed,
            allowed_stride,
            count,
            lowest,
            least,
            found + one,
            found + 2 * one,
            found + 3 * one,
            by,
            block,
        )
        reached = (sum1 >= wanted).to(tl.int64) + (sum2 >= wanted).to(tl.int64) + (sum3 >= wanted).to(tl.int64)
        found += reached * one
    return found


@triton.jit
def pick(
    logits: tl.tensor,
    rules: tl.tensor,
    masks: tl.tensor,
    allowed: tl.tensor,
    maxima: tl.tensor,
    weights: tl.tensor,
    chunk_sums: tl.tensor,
    candidates: tl.tensor,
    num_candidates: tl.tensor,
    chosen: tl.tensor,
    logits_stride: tl.tensor,
    allowed_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_groups: tl.tensor,
    num_chunks: tl.tensor,
    padded_groups: tl.constexpr,
    padded_chunks: tl.constexpr,
    chunk_tokens: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Each row's token."""
    row = tl.program_id(0).to(tl.int64)
    best, best_token = _best_of(maxima, row, num_groups, padded_groups)
    top_p = _load_rule(rules, row, _TOP_P)
    uniform = _load_rule(rules, row, _UNIFORM)
    is_ranked = _is_ranked(rules, row, vocab_size)
    row_weights = weights + row * vocab_size
    if _is_sampled(rules, row, best) == 0:
        tl.store(chosen + row, best_token)
    elif is_ranked | (top_p < 1.0):
        row_candidates = candidates + row * vocab_size
        row_logits = logits + row * logits_stride
        mask = tl.load(masks + row)
        count = tl.load(num_candidates + row)
        lowest = tl.full([], 0, tl.int64)
        least = tl.full([], 1, tl.int64)
        zero = tl.full([], 0, tl.int64)
        if is_ranked:
            top_k = _load_rule(rules, row, _TOP_K).to(tl.int64)
            lowest = _greatest_reaching(
                row_candidates,
                row_weights,
                row_logits,
                mask,
                allowed,
                allowed_stride,
                count,
                zero,
                zero,
                top_k,
                _BY_KEY,
                32,
                block,
            )
        if top_p < 1.0:
            if is_ranked:
                total, _, _ = _sums_from(
                    row_candidates,
                    row_weights,
                    row_logits,
                    mask,
                    allowed,
                    allowed_stride,
                    count,
                    lowest,
                    least,
                    zero,
                    zero,
                    zero,
                    _BY_TOKEN,
                    block,
                )
            else:
                number = tl.arange(0, padded_chunks)
                sums = tl.load(chunk_sums + row * num_chunks + number, mask=number < num_chunks, other=0)
                total = tl.sum(sums, 0)
            least = _greatest_reaching(
                row_candidates,
                row_weights,
                row_logits,
                mask,
                allowed,
                allowed_stride,
                count,
                lowest,
                least,
                _share(top_p, total),
                _BY_WEIGHT,
                44,
                block,
            )
        kept, _, _ = _sums_from(
            row_candidates,
            row_weights,
            row_logits,
            mask,
            allowed,
            allowed_stride,
            count,
            lowest,
            least,
            zero,
            zero,
            zero,
            _BY_TOKEN,
            block,
        )
        target = tl.minimum((uniform * kept.to(tl.float64)).to(tl.int64), kept - 1)
        token = _greatest_reaching(
            row_candidates,
            row_weights,
            row_logits,
            mask,
            allowed,
            allowed_stride,
            count,
            lowest,
            least,
            kept - target,
            _BY_TOKEN,
            20,
            block,
        )
        tl.store(chosen + row, token)
    else:
        number = tl.arange(0, padded_chunks)
        sums = tl.load(chunk_sums + row * num_chunks + number, mask=number < num_chunks, other=0)
        total = tl.sum(sums, 0)
        target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
        before = tl.cumsum(sums, 0)
        chunk = tl.sum((before <= target).to(tl.int32), 0)
        left = target - tl.sum(tl.where(number < chunk, sums, 0), 0)
        place = tl.arange(0, chunk_tokens)
        at = chunk * chunk_tokens + place
        weight = tl.load(row_weights + at, mask=at < vocab_size, other=0)
        passed = tl.sum((tl.cumsum(weight, 0) <= left).to(tl.int32), 0)
        tl.store(chosen + row, (chunk * chunk_tokens + passed).to(tl.int64))
