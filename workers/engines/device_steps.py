"""The forward pass on a GPU: one copy in, and for decode one launch of a recorded graph.

A step whose requests feed one token each runs as the graph of the next larger number of requests. Padding requests
write nowhere, and no row's bits depend on other rows, so a token has the same bits from a graph and from a launch of
each kernel. All other steps launch each kernel.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from actorserve.core.messages import StepPlan
from workers.attention import Attention
from workers.batch import IntArray
from workers.kv.cache import KVCache
from workers.kv.layer_progress import LayerProgress
from workers.models.decoder import Decoder, Tiles
from workers.packed_batch import NO_RULES, Doubles, PackedBatch, PackedBatches
from workers.weights.decoder_weights import Progress

_log = logging.getLogger(__name__)

_SMALL_GRAPHS = (1, 2, 4, 8)
_GRAPH_STEP = 16  # requests; up to 15 padding rows cost less than the many graphs that would avoid them


HasRoom = Callable[[IntArray], bool]


def _always(_: IntArray) -> bool:
    return True


class Recorder(Protocol):
    """Records launches on the current stream, to launch them again at once."""

    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """The tensor that ``work`` returns, and a function that launches all of it again, with the same addresses.

        ``work`` must have run before. Raises: RuntimeError if it does something that cannot be recorded.
        """
        ...


class GraphRecorder:
    """Recorder of CUDA graphs, which share their memory for intermediate results."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        # Other threads copy KV meanwhile, which must not end the recording.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()
        return result, graph.replay


@dataclass(frozen=True, slots=True)
class _Graph:
    hidden: Tensor
    launch: Callable[[], None]


class DeviceSteps:
    """Runs a decoder's layers on a GPU. One thread calls it, in the order of the steps."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        attention: Attention,
        layer_tiles: Tiles,
        batches: PackedBatches,
        has_room: HasRoom = _always,
        progress: LayerProgress | None = None,
    ) -> None:
        """``attention`` must read only a batch's tensors, and must not wait for the device. ``has_room``: whether it
        does the same for requests with these context lengths as it did when the graphs were recorded. ``progress``
        gets a report of each layer, or from a graph, of the step alone.
        """
        self.layer_tiles = layer_tiles
        self._model = model
        self._cache = cache
        self._attention = attention
        self._batches = batches
        self._has_room = has_room
        self._progress = progress
        self._graphs: dict[int, _Graph] = {}  # by number of requests, in ascending order

    def record(self, num_requests: Sequence[int], recorder: Recorder, progress: Progress) -> None:
        """Record the graphs of decode steps of up to so many requests each. Without them every kernel is launched.

        If one cannot be recorded, the log says why, and there are none.
        """
        graphs: dict[int, _Graph] = {}
        nothing = StepPlan(0, (), (), (), (), ())
        for number, count in enumerate(sorted(num_requests, reverse=True)):  # the largest first: others use its memory
            packed = self._batches.make(nothing, count)
            self._run(packed)  # compiles the kernels
            try:
                graphs[count] = _Graph(*recorder.record(lambda packed=packed: self._run(packed)))  # type: ignore[misc]
            except RuntimeError as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                _log.warning(
                    "decode runs without CUDA graphs, because recording one of %d requests failed: %s", count, reason
                )
                return
            progress((number + 1) / len(num_requests))
        self._graphs = dict(sorted(graphs.items()))

    def forward(self, plan: StepPlan, rules: Doubles = NO_RULES) -> tuple[PackedBatch, Tensor]:
        """Launch the plan: its batch, and its tokens' hidden states [T or more, hidden_size], padding last. Both are
        overwritten by the next step; work that is launched before may read them. ``rules`` travel with the plan.

        Raises: ValueError as ``PackedBatches.make``.
        """
        size = self._graph_size(plan)
        packed = self._batches.make(plan, size, rules)
        progress = self._progress
        if size is None:
            return packed, self._run(packed, None if progress is None else progress.of_step(plan.step_id))
        graph = self._graphs[size]
        graph.launch()
        if progress is not None:
            progress.end(plan.step_id)
        return packed, graph.hidden

    def keep_tokens(self, packed: PackedBatch, token_ids: Tensor) -> None:
        """As `PackedBatches.keep_tokens`."""
        self._batches.keep_tokens(packed, token_ids)

    def drop(self, request_id: str) -> None:
        """As `PackedBatches.drop`."""
        self._batches.drop(request_id)

    def _graph_size(self, plan: StepPlan) -> int | None:
        """The number of requests of the graph that the plan runs as; None if there is none for it."""
        count = len(plan.request_ids)
        if any(len(token_ids) != 1 for token_ids in plan.token_ids):
            return None
        size = next((size for size in self._graphs if size >= count), None)
        if size is None:
            return None
        context_lens = np.ones(size, np.int64)
        context_lens[:count] += plan.starts
        return size if self._has_room(context_lens) else None

    def _run(self, packed: PackedBatch, report: Callable[[int], None] | None = None) -> Tensor:
        self._batches.unpack(packed)
        return self._model.forward(packed.batch, self._cache, self._attention, self.layer_tiles, report)


def graph_sizes(max_requests: int) -> tuple[int, ...]:
    """The numbers of requests that graphs are recorded for, so that any step of up to ``max_requests`` has one."""
    sizes = (*_SMALL_GRAPHS, *range(_GRAPH_STEP, max_requests, _GRAPH_STEP))
    return (*(size for size in sizes if size < max_requests), max_requests)
