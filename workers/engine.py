"""The engine protocol: what computes tokens, as the worker process sees it.

One thread calls ``add``, ``drop`` and ``begin``, and another one asks the steps that were begun for their results, in
order. Another calls ``copy_out`` and ``copy_in``, and another ``prepare``, concurrently with the steps. Further threads
read and write blocks of ``kv`` for other workers. Each thread's calls come in the order in which the instance's core
issued them. A request is added before its first step and dropped after its last was begun, and no step touches a block
while it is copied. The engine holds the KV pool and a pool on
the host that KV is swapped out to. The core decides which request owns which block, and names the blocks in every plan
and copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from actorserve.core.kv.layer_groups import LayerGroups
from actorserve.core.messages import ModelInfo, RequestSpec, StepDone, StepPlan
from workers.kv.pools import KVPools
from workers.sampling.grammars import PreparedGrammar


class PendingStep(Protocol):
    """An iteration that the engine has begun."""

    def result(self) -> StepDone:
        """Wait until its tokens are on the host. The results of an engine's steps are asked for in their order.

        Raises: whatever the device raises; then the worker process ends, and other workers continue its requests.
        """
        ...


@dataclass(frozen=True, slots=True)
class EndedStep:
    """Implements ``PendingStep`` for an engine that computes while the step is begun."""

    done: StepDone

    def result(self) -> StepDone:
        return self.done


class Engine(Protocol):
    """Computes iterations of a batch. Deterministic: a token depends on its request alone (design invariant 3)."""

    @property
    def model(self) -> ModelInfo:
        """The served model; ``max_tokens`` is its context, bounded by the KV pool."""
        ...

    @property
    def kind(self) -> str:
        """Hex digest of everything that decides bits: weights, numeric mode, kernels, ISA or GPU, threads."""
        ...

    @property
    def weights_digest(self) -> str:
        """Hex digest of the model's weights and shape, on whatever they are computed."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks in the KV pool."""
        ...

    @property
    def tokens_per_block(self) -> int: ...

    @property
    def bytes_per_block(self) -> int:
        """KV bytes of one block, which holds tokens of one layer group's layers."""
        ...

    @property
    def layer_groups(self) -> LayerGroups:
        """How the model's layers share the pool."""
        ...

    @property
    def num_host_blocks(self) -> int:
        """Blocks in the pool on the host; 0 if KV is never swapped out."""
        ...

    @property
    def num_written_host_blocks(self) -> int:
        """Blocks of the host's pool that were ever written. Any thread may ask."""
        ...

    @property
    def kv(self) -> KVPools:
        """Both pools as bytes, for copies between workers (``workers.kv_transfer``). No step touches a block that a
        transfer writes, and no step writes a block that a transfer reads.
        """
        ...

    def prepare(self, request: RequestSpec) -> PreparedGrammar | None:
        """Begin to compile the request's grammar, in another thread, and return at once. None if it has none.

        A grammar that cannot be compiled makes the request fail in its first step that samples (``StepDone.failed``).
        """
        ...

    def add(self, request: RequestSpec, grammar: PreparedGrammar | None = None) -> None:
        """Create the request's sampling state, before its first step. ``grammar`` is what ``prepare`` gave for it.

        Raises: ValueError if the request has a grammar that was not prepared.
        """
        ...

    def drop(self, request_id: str) -> None:
        """Forget the request. Unknown ids are ignored."""
        ...

    def begin(self, plan: StepPlan) -> PendingStep:
        """Run one iteration and sample. A device that computes by itself goes on after the return, and the next step
        may be begun meanwhile. Its ``NOT_YET`` tokens are those that this step samples.

        Blocks until the grammars of the requests that are sampled are prepared. Raises: as ``PendingStep.result``.
        """
        ...

    def copy_out(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copy ``device_blocks[i]`` of the KV pool to ``host_blocks[i]``; return when the copies are complete.

        Raises: ValueError as ``workers.kv.pools.check_copy`` does; whatever the device raises, as ``step`` does.
        """
        ...

    def copy_in(self, host_blocks: Sequence[int], device_blocks: Sequence[int]) -> None:
        """Copy back to the KV pool. A step that begins after the return reads the copies. Raises: as ``copy_out``."""
        ...
