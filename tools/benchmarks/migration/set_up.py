"""Shared by the benchmarks with two real workers: the model, the pairs of workers, the requests and the checks."""

import argparse
import asyncio
import itertools
import json
import random
import signal
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop

from actorserve.core.messages import RequestSpec, SamplingParams
from actorserve.host import available_memory_bytes
from actorserve.processes import launch
from actorserve.processes.runtime_folder import runtime_folder
from actorserve.settings import load_settings
from tools.benchmarks.common.arguments import add_json
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.prompts import prompt_token_ids
from tools.benchmarks.migration.pair import SOURCE, Pair
from tools.benchmarks.migration.supervised import with_workers

MODEL_NAME = "bench-migration"
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
"""The configuration of a made-up model with grouped queries and random weights."""

_ID_RANGE = (16, SHAPE["vocab_size"])
_KV_BYTES = 2  # per number, in the CPUs' numeric modes
_SPARE_KV = 1.5  # so that no request is preempted, and no cached prompt is evicted


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each worker (%(default)s)")
    parser.add_argument("--dtype", default="int8", choices=("int8", "int4", "bfloat16"), help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same requests")
    add_json(parser)
    parser.add_argument("--engine", default="torch", help=argparse.SUPPRESS)


def model_shape(max_tokens: int) -> dict[str, Any]:
    return SHAPE | {"max_position_embeddings": max_tokens}


def write_model(folder: Path, max_tokens: int) -> Path:
    """The model's folder, which holds only a configuration: loading makes up the weights."""
    model = folder / MODEL_NAME
    model.mkdir()
    (model / "config.json").write_text(json.dumps(model_shape(max_tokens)), encoding="utf-8")
    return model


class PairMaker:
    """Makes pairs of workers that differ in a few settings. Closing ``stack`` removes their sockets and files."""

    def __init__(
        self, arguments: argparse.Namespace, folder: Path, stack: ExitStack, num_pairs: int, max_tokens: int
    ) -> None:
        """``max_tokens``: of the longest request, with its answer."""
        self._arguments = arguments
        self._folder = folder
        self._stack = stack
        self._max_tokens = max_tokens
        self._memory_bytes = max(1, available_memory_bytes() // (2 * num_pairs))
        self._model = write_model(folder, max_tokens)

    def folder_of(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        return folder

    def make(self, name: str, num_tokens: int, settings: Mapping[str, Mapping[str, Any]], host_copies: int = 0) -> Pair:
        """A pair whose KV caches hold ``num_tokens`` at least; the host's pool is ``host_copies`` times as large."""
        kv_bytes = int(num_tokens * _SPARE_KV) * kv_bytes_per_token(self._arguments.engine)
        values: dict[str, dict[str, Any]] = {
            "model": {"path": str(self._model), "load_format": "dummy", "dtype": self._arguments.dtype},
            "workers": {
                "count": 2,
                "device": "cpu",
                "engine": self._arguments.engine,
                "threads": self._arguments.threads,
                "memory_bytes": self._memory_bytes,
                "kv_cache_bytes": kv_bytes,
                "host_kv_bytes": host_copies * kv_bytes,
                "max_context_tokens": self._max_tokens,
            },
        }
        values |= {section: dict(table) for section, table in settings.items()}
        resolved, placement = launch.resolve_workers(load_settings(None, values))
        return Pair(name, resolved, placement, self._stack.enter_context(runtime_folder(resolved.cluster)))


def kv_bytes_per_token(engine: str) -> int:
    if engine == "fake":
        from workers.engines.fake_engine import BYTES_PER_TOKEN

        return BYTES_PER_TOKEN
    head_dim = SHAPE["hidden_size"] // SHAPE["num_attention_heads"]
    return int(2 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * head_dim * _KV_BYTES)


class Requests:
    """Requests that depend on the seed and their name alone; each has an id of its own."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._numbers = itertools.count()

    def make(self, name: str, num_tokens: int, max_tokens: int, priority: int = 0) -> RequestSpec:
        """A prompt of ``num_tokens``, with an answer of fewer than ``max_tokens``."""
        rng = random.Random(f"{self._seed} {name}")
        prompt = prompt_token_ids(num_tokens, _ID_RANGE, rng)
        sampling = SamplingParams(seed=rng.randrange(2**32), max_tokens=max_tokens - 1)
        return RequestSpec(f"{name}-{next(self._numbers)}", tuple(prompt), sampling, priority=priority)


async def undisturbed_tokens(pair: Pair, request: RequestSpec, num_tokens: int) -> list[int]:
    """The tokens of a request that stays on its worker. Raises: BenchError."""
    stream = pair.open(request, SOURCE)
    await pair.until_made([stream], num_tokens)
    await pair.end_all()
    return stream.token_ids[:num_tokens]


def require_tokens(expected: Sequence[int], got: Iterable[tuple[str, Sequence[int]]]) -> None:
    """Compare named answers with an undisturbed one, as far as that goes.

    Raises: BenchError for the first answer that differs, because a measurement that changes tokens is worthless.
    """
    for name, token_ids in got:
        if tuple(token_ids[: len(expected)]) != tuple(expected):
            raise BenchError(f"{name} got other tokens")


def run_with_workers(
    pairs: Iterable[Pair],
    work: Callable[[], Coroutine[None, None, None]],
    tell: Callable[[str], None],
    max_restarts: int = 0,
) -> None:
    """Do ``work`` while the pairs' workers run, and end all processes, also when interrupted.

    Raises: ActorserveError, KeyboardInterrupt.
    """
    uvloop.run(_run_with_workers(pairs, work, tell, max_restarts))


async def _run_with_workers(
    pairs: Iterable[Pair],
    work: Callable[[], Coroutine[None, None, None]],
    tell: Callable[[str], None],
    max_restarts: int,
) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await with_workers(pairs, work, tell, max_restarts)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
