"""A GPU's steps on a CPU: Triton interprets the kernels, and a graph is work that runs again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actorserve.core.messages import StepPlan
from actorserve.model_files.describe import describe
from workers.attention.triton_paged import TritonPagedAttention
from workers.batch import IntArray
from workers.engines.device_steps import DeviceSteps, HasRoom, graph_sizes
from workers.kernels.choose import Kernels
from workers.kernels.numerics import numerics
from workers.kernels.tiles import AnyRows
from workers.kernels.triton.row_ops import TritonRowOps
from workers.kv.cache import KVCache
from workers.kv.layer_progress import LayerProgress
from workers.kv.layer_split import split_layers
from workers.models.build import load_model
from workers.models.decoder import Decoder
from workers.packed_batch import PackedBatches, PlanLimits
from workers.weights.store import FromFiles

CPU = torch.device("cpu")
SIZE = 16
"""Tokens of a block."""
NUM_BLOCKS = 40
LIMITS = PlanLimits(max_requests=6, max_tokens=64, max_blocks=NUM_BLOCKS)


@dataclass
class Replays:
    """Recorder on a CPU: launching again runs the work again, and puts its result at the recorded address."""

    sizes: list[int] = field(default_factory=list)
    num_launched: int = 0

    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        result = work()
        self.sizes.append(len(result))

        def launch() -> None:
            self.num_launched += 1
            result.copy_(work())

        return result, launch


def has_any_room(_: IntArray) -> bool:
    return True


class OnGpu:
    """A small model that runs as on a GPU."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        recorder: Any = None,
        has_room: HasRoom = has_any_room,
        sizes: Sequence[int] = graph_sizes(LIMITS.max_requests),
        progress: LayerProgress | None = None,
    ) -> None:
        """``sizes``: the numbers of requests that ``recorder`` records graphs of."""
        monkeypatch.setattr(Kernels, "row_ops", TritonRowOps())
        description = describe(folder)
        kernels = Kernels(numerics("float32", CPU), CPU, native=False)
        self.model: Decoder = load_model(description, 512, kernels, FromFiles(description), lambda _: None)
        config = description.config
        split = split_layers(config.windows, 512)
        cache = KVCache(config, NUM_BLOCKS, SIZE, torch.float32, CPU, split=split)
        cache.pool.zero_()
        attention = TritonPagedAttention(config.query_scale)
        batches = PackedBatches(replace(LIMITS, num_groups=split.groups.num_groups), SIZE, CPU)
        self.steps = DeviceSteps(self.model, cache, attention, AnyRows(), batches, has_room, progress)
        if recorder is not None:
            self.steps.record(sizes, recorder, lambda _: None)

    def logits(self, plan: StepPlan) -> Tensor:
        """The sampling rows' logits; the best tokens are kept as the last ones."""
        packed, hidden = self.steps.forward(plan)
        (logits,) = self.model.logits(hidden.index_select(0, packed.batch.sample_rows))
        self.steps.keep_tokens(packed, logits.argmax(-1))
        return logits
