"""Requests whose keys and values lie in scattered blocks, for the tests of attention backends."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actorserve.core.kv.layer_groups import NO_BLOCK
from actorserve.core.messages import StepPlan
from workers.attention import Attention
from workers.batch import make_batch
from workers.kv.cache import transposed

Chunk = tuple[int, int]
"""The first token of a chunk, and the token after its last."""


@dataclass(frozen=True)
class Request:
    """A whole context: query [n, num_heads, head_dim], key and value [num_kv_heads, n, head_dim]."""

    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def num_tokens(self) -> int:
        return self.query.shape[0]


def make_request(
    num_tokens: int,
    num_kv_heads: int,
    group_heads: int,
    head_dim: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> Request:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(num_tokens, num_kv_heads * group_heads, head_dim, generator=generator)
    key, value = torch.randn(2, num_kv_heads, num_tokens, head_dim, generator=generator).to(kv_dtype or dtype)
    return Request((2 * query).to(device, dtype), key.to(device), value.to(device))


def dense(request: Request, window: int | None = None, scale: float | None = None) -> Tensor:
    """Causal attention in float64, written plainly."""
    query, key, value = request.query.double(), request.key.double(), request.value.double()
    group_heads = query.shape[1] // key.shape[0]
    key, value = key.repeat_interleave(group_heads, 0), value.repeat_interleave(group_heads, 0)
    scores = torch.einsum("qhd,hkd->hqk", query, key) * (scale or query.shape[-1] ** -0.5)
    everyone = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device)
    hidden = everyone.triu(1)
    if window is not None:
        hidden |= everyone.tril(-window)
    return torch.einsum("hqk,hkd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value)


def attend(
    backend: Attention,
    requests: Sequence[Request],
    chunks: Sequence[Chunk],
    tokens_per_block: int,
    seed: int,
    window: int | None = None,
) -> Tensor:
    """One step that computes tokens ``start`` to ``end`` of each request, from scattered blocks with NaN wherever the
    backend must not read. Blocks before the window of the first token were given up."""
    device, dtype = requests[0].query.device, requests[0].key.dtype
    needed = [-(-end // tokens_per_block) for _, end in chunks]
    free = list(range(sum(needed) + 3))
    random.Random(seed).shuffle(free)
    num_kv_heads, _, head_dim = requests[0].key.shape
    # As in the engine: keys and values are views into one pool, and keys lie as the backend wants them.
    shape = (2, num_kv_heads, len(free) * tokens_per_block, head_dim)
    pool = torch.full(shape, torch.nan, dtype=dtype, device=device)
    tables = []
    for request, (start, end), count in zip(requests, chunks, needed, strict=True):
        first = 0 if window is None else max(0, start - window + 1) // tokens_per_block
        blocks = [NO_BLOCK if number < first else free.pop() for number in range(count)]
        tables.append(tuple(blocks))
        held = range(first * tokens_per_block, end)
        slots = [blocks[p // tokens_per_block] * tokens_per_block + p % tokens_per_block for p in held]
        if backend.reads_whole_blocks:
            for block in blocks[first:]:
                pool[:, :, block * tokens_per_block : (block + 1) * tokens_per_block] = 0.0
        begin = held.start
        pool[0][:, slots], pool[1][:, slots] = request.key[:, begin:end], request.value[:, begin:end]
    keys = transpose(pool[0], tokens_per_block) if backend.keys_transposed else pool[0]
    plan = StepPlan(
        step_id=0,
        request_ids=tuple(str(number) for number in range(len(requests))),
        starts=tuple(start for start, _ in chunks),
        token_ids=tuple((0,) * (end - start) for start, end in chunks),
        block_tables=tuple(tables),
        samples=(False,) * len(requests),
    )
    query = torch.cat([request.query[start:end] for request, (start, end) in zip(requests, chunks, strict=True)])
    return backend(query, keys, pool[1], make_batch(plan, tokens_per_block, device), window)


def transpose(keys: Tensor, tokens_per_block: int) -> Tensor:
    """[num_kv_heads, num_slots, head_dim] into the layout of ``workers.kv.cache.transposed``, in place."""
    target = transposed(keys, tokens_per_block)
    num_kv_heads, num_blocks, num_words, _, per_word = target.shape
    plain = keys.reshape(num_kv_heads, num_blocks, tokens_per_block, num_words, per_word).clone()
    return target.copy_(plain.transpose(2, 3))


def in_chunks(
    backend: Attention, request: Request, sizes: Iterator[int], tokens_per_block: int, window: int | None = None
) -> Tensor:
    """Attention over the whole context, one chunk per step."""
    parts, start = [], 0
    while start < request.num_tokens:
        end = min(start + next(sizes), request.num_tokens)
        parts.append(attend(backend, [request], [(start, end)], tokens_per_block, seed=end, window=window))
        start = end
    return torch.cat(parts)


def forever(size: int) -> Iterator[int]:
    while True:
        yield size


def at_random(seed: int) -> Iterator[int]:
    source = random.Random(seed)
    while True:
        yield source.choice((1, 2, 7, 16, 33, 130))
