"""``tools/bench launches``: what one step launches, copies and waits for on a GPU, counted without one."""

import argparse
import importlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from actorserve.core.messages import RequestSpec, SamplingParams, StepPlan
from actorserve.model_files.describe import describe
from actorserve.model_files.description import ModelDescription
from tools.benchmarks.common.arguments import add_json, count
from tools.benchmarks.common.console import print_table, say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.engine.launch_counter import DEVICE, Counts, counting
from tools.figures.figure import Column, Figure, FigureTable, Row as FigureRow
from workers.attention.triton_paged import TritonPagedAttention
from workers.engines.device_steps import DeviceSteps
from workers.engines.steps_ahead import StepsAhead
from workers.kernels.choose import Kernels
from workers.kernels.numerics import numerics
from workers.kernels.row_ops import RowOps
from workers.kernels.tiles import AnyRows
from workers.kernels.triton.linear import TritonLinear
from workers.kernels.triton.row_ops import TritonRowOps
from workers.kv.cache import KVCache
from workers.models.build import make_decoder
from workers.packed_batch import PackedBatches, PlanLimits
from workers.sampling.grammars import Grammars
from workers.sampling.prompt_scorer import PromptScorer
from workers.sampling.sampler import Sampler
from workers.sampling.triton_choice import choose_on_gpu
from workers.weights.decoder_weights import Weights

TITLE = "Launches, copies and waits of a step of decode on a GPU"
TOKENS_PER_BLOCK = 16
CONTEXT_TOKENS = 1000

_LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
_QWEN3_8B = _LLAMA_3_8B | {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "head_dim": 128,
}
_GEMMA_3_4B = _LLAMA_3_8B | {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
_MIXTRAL_8X7B = _LLAMA_3_8B | {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_QWEN3_30B_A3B = _QWEN3_8B | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3-8B": _LLAMA_3_8B,
    "Qwen3-8B": _QWEN3_8B,
    "Gemma-3-4B": _GEMMA_3_4B,
    "Mixtral-8x7B": _MIXTRAL_8X7B,
    "Qwen3-30B-A3B": _QWEN3_30B_A3B,
}


class _NoNumbers(Weights):
    """Weights without numbers, which nothing reads from a file."""

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        return torch.empty(self._specs[name].shape, dtype=dtype, device=self.device)


class _KeepsNothing:
    digest = ""

    def tensor(self, name: str, make: Any) -> Any:
        return make()

    quantized = tensor


class _GpuKernels(Kernels):
    """A GPU's kernels, for the device without numbers."""

    runs_grouped = True

    @property
    def float_linear(self) -> type[TritonLinear]:
        return TritonLinear

    @property
    def row_ops(self) -> RowOps:
        return TritonRowOps()


@dataclass(frozen=True, slots=True)
class StepCounts:
    """``layer``: launches of one layer. ``step``: all from the plan to the copy of the tokens to the host."""

    name: str
    layer: int
    step: Counts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=count, default=8, help="in the step (%(default)s)")
    parser.add_argument("--kernels", action="store_true", help="also list the kernels of each model")
    add_json(parser)


def count_model(name: str, shape: dict[str, Any], num_requests: int) -> StepCounts:
    """Count one decode step of a model of that shape (a ``config.json``), without graphs.

    Raises: ImportError without Triton.
    """
    small, larger = (_count(shape | {"num_hidden_layers": layers}, num_requests) for layers in (1, 2))
    return StepCounts(name, larger.num_launches - small.num_launches, _count(shape, num_requests))


def _count(shape: dict[str, Any], num_requests: int) -> Counts:
    importlib.import_module("workers.attention.triton_kernel")  # before the interpreter is named
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        description = describe(Path(folder), "dummy")
    with counting():
        steps = _steps(description, num_requests)
    names = tuple(f"r{number}" for number in range(num_requests))
    blocks = -(-CONTEXT_TOKENS // TOKENS_PER_BLOCK)
    tables = tuple(tuple(range(row * blocks, (row + 1) * blocks)) for row in range(num_requests))
    last = (CONTEXT_TOKENS - 1,) * num_requests
    plan = StepPlan(0, names, last, ((7,),) * num_requests, tables, (True,) * num_requests)
    with counting() as counts:
        steps.begin(plan, names, (1,) * num_requests)
    return counts


def _steps(description: ModelDescription, num_requests: int) -> StepsAhead:
    config = description.config
    kernels = _GpuKernels(numerics("bfloat16", DEVICE), DEVICE, native=False)
    weights = _NoNumbers(description, _no_source, _KeepsNothing(), kernels, lambda _: None)
    model = make_decoder(weights, config.max_position_embeddings)
    num_blocks = num_requests * -(-CONTEXT_TOKENS // TOKENS_PER_BLOCK)
    cache = KVCache(config, num_blocks, TOKENS_PER_BLOCK, torch.bfloat16, DEVICE)
    with patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):  # so that tensors need not be on CUDA
        attention = TritonPagedAttention(config.query_scale)
    limits = PlanLimits(num_requests, num_requests, num_blocks)
    batches = PackedBatches(limits, TOKENS_PER_BLOCK, DEVICE)
    steps = DeviceSteps(model, cache, attention, AnyRows(), batches)
    sampler = Sampler(config.vocab_size, DEVICE)
    for number in range(num_requests):
        sampler.add(RequestSpec(f"r{number}", (1,), SamplingParams(seed=0, max_tokens=10)))
    grammars = Grammars(_no_source, config.vocab_size, ())

    def head(hidden: Tensor) -> Tensor:
        return model.logits(hidden)[0]

    return StepsAhead(steps, head, choose_on_gpu, sampler, grammars, PromptScorer(), config.vocab_size, DEVICE)


def _no_source() -> Any:
    raise AssertionError("neither weights nor grammars are read")


def table_of(steps: Sequence[StepCounts]) -> FigureTable:
    columns = (
        Column("launches a layer", decimals=0),
        Column("launches a step", decimals=0),
        Column("copies in", decimals=0),
        Column("copies out", decimals=0),
        Column("waits before the next step", decimals=0),
    )
    rows = tuple(
        FigureRow(
            step.name,
            (
                Figure(step.layer),
                Figure(step.step.num_launches),
                *(Figure(getattr(step.step, name)) for name in ("copies_in", "copies_out", "waits")),
            ),
        )
        for step in steps
    )
    return FigureTable(TITLE, "model", columns, rows)


def show(table: FigureTable, console: Console) -> None:
    shown = Table(table.corner, *(column.name for column in table.columns))
    for row in table.rows:
        cells = zip(row.cells, table.columns, strict=True)
        shown.add_row(
            row.name, *("" if cell is None else f"{cell.median:.{column.decimals}f}" for cell, column in cells)
        )
    print_table(console, shown)


def run(arguments: argparse.Namespace) -> int:
    """Count and report. Raises: BenchError."""
    console = Console()
    try:
        steps = [count_model(name, shape, arguments.requests) for name, shape in SHAPES.items()]
    except ImportError as error:
        raise BenchError(f"GPU kernels are counted with the package triton: {error}") from None
    say(console, f"decode of {arguments.requests} requests in bfloat16, counted on no GPU, before graphs")
    show(table_of(steps), console)
    if arguments.kernels:
        for step in steps:
            kernels = ", ".join(f"{number} {name}" for name, number in step.step.launches.most_common())
            say(console, f"{step.name}: {kernels}")
    save_figures(arguments, [table_of(steps)], {"num_requests": arguments.requests})
    return 0
