"""The iterations that a profile is fitted to."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from workers.engine import Engine
from workers.profile.engine_timer import Shape


@dataclass(frozen=True, slots=True)
class Plan:
    """The iterations that a profile is fitted to, and those that it is then compared with.

    ``anchor`` runs before each of them. Its times tell how fast the machine is at that moment.
    """

    anchor: Shape
    fitted: tuple[Shape, ...]
    compared: tuple[Shape, ...] = ()


def quick_plan(engine: Engine, max_batch_tokens: int, max_batch_requests: int) -> Plan:
    """Few shapes, for a first start."""
    most = min(max_batch_tokens, engine.model.max_tokens)
    half = min(512, engine.model.max_tokens // 2)
    prompts = _prefills(_distinct(1, most // 16, most // 8, most // 4, most // 2, most), (0,))
    chunks = _prefills(_distinct(most // 4, most=half), _whole_blocks(engine, half))
    batches = _distinct(1, 4, 16, max_batch_requests, most=max_batch_requests)
    decodes = _decodes(batches, _whole_blocks(engine, half // 16, half))
    few = min(8, max_batch_requests)
    mixed = _mixed(
        _prefills(_distinct(most // 16, most // 4, most=half), (0,)), few, _whole_blocks(engine, half // 4)[0]
    )
    return Plan(_anchor(decodes), _unique(prompts, chunks, _halves(engine, most), decodes, mixed))


def thorough_plan(engine: Engine, max_batch_tokens: int, max_batch_requests: int) -> Plan:
    """Many shapes, and some to compare with."""
    most = min(max_batch_tokens, engine.model.max_tokens)
    long = min(2048, engine.model.max_tokens // 2)
    doubling = [2**n for n in range(math.ceil(math.log2(max(2, most))))]
    prompts = _prefills(_distinct(*doubling, *(3 * n // 2 for n in doubling[6:]), most, most=most), (0,))
    chunks = _prefills(_distinct(most // 16, most // 4, most=long), _whole_blocks(engine, long // 4, long))
    batches = _distinct(*(2**n for n in range(10)), max_batch_requests, most=max_batch_requests)
    decodes = _decodes(batches, _whole_blocks(engine, long // 32, long // 4, long))
    few, many = min(8, max_batch_requests), min(32, max_batch_requests)
    near, far = _whole_blocks(engine, long // 8)[0], _whole_blocks(engine, long // 4)[0]
    mixed = [
        *_mixed(_prefills(_distinct(most // 32, most // 8, most=long), (0,)), few, near),
        *_mixed(_prefills(_distinct(most // 32, most // 8, most=long), (0,)), many, near),
        *_mixed(_prefills(_distinct(most // 8, most=long), _whole_blocks(engine, long // 2)), few, far),
    ]
    compared = _mixed(
        _prefills(_distinct(16, most // 16, most // 4, most=long), _whole_blocks(engine, 0, long // 2)), few, far
    )
    fitted = _unique(prompts, chunks, _halves(engine, most), decodes, mixed)
    return Plan(_anchor(decodes), fitted, tuple(shape for shape in compared if shape not in fitted))


def _halves(engine: Engine, most: int) -> list[Shape]:
    """Second halves of prompts: what a further chunk costs is the difference to the whole prompt."""
    halves = _whole_blocks(engine, most // 8, most // 4, most // 2)
    return [Shape(half, half, 0, 0) for half in halves if half]


def _anchor(decodes: Sequence[Shape]) -> Shape:
    """A short iteration of a few decodes."""
    return min(decodes, key=lambda shape: (abs(shape.num_requests - 4), shape.num_context_tokens))


def _mixed(chunks: Sequence[Shape], num_requests: int, num_context_tokens: int) -> list[Shape]:
    return [Shape(chunk.num_tokens, chunk.num_before, num_requests, num_context_tokens) for chunk in chunks]


def _unique(*groups: Sequence[Shape]) -> tuple[Shape, ...]:
    return tuple(dict.fromkeys(itertools.chain(*groups)))


def _prefills(lengths: Sequence[int], contexts: Sequence[int]) -> list[Shape]:
    return [Shape(num_tokens, context, 0, 0) for context, num_tokens in itertools.product(contexts, lengths)]


def _decodes(batches: Sequence[int], contexts: Sequence[int]) -> list[Shape]:
    return [Shape(0, 0, batch, context) for context, batch in itertools.product(contexts, batches)]


def _distinct(*numbers: int, most: int | None = None) -> tuple[int, ...]:
    return tuple(sorted({max(1, number if most is None else min(number, most)) for number in numbers}))


def _whole_blocks(engine: Engine, *numbers: int) -> tuple[int, ...]:
    return tuple(sorted({number // engine.tokens_per_block * engine.tokens_per_block for number in numbers}))
