"""The engine protocol: what computes tokens, as the worker process sees it.

An engine is synchronous and runs on two threads: ``add``, ``drop`` and ``step`` on one, ``copy_out`` and ``copy_in`` on
another, beside the steps. Further threads read and write blocks of ``kv``, for other workers. On each thread calls come
in the order in which the instance's core issued them; a request is added before its first step and dropped after its
last, and no step touches a block while it is copied. The engine holds the KV pool, and a pool on the host that KV is
swapped to; which block belongs to whom is decided by the core and stated in every plan and copy.
"""

from collections.abc import Sequence
from typing import Protocol

from actorserve.core.messages import ModelInfo, RequestSpec, StepDone, StepPlan
from workers.kv.pools import KVPools


class Engine(Protocol):
    """Computes iterations of a batch. Deterministic: a token depends on its request alone (design invariant 3)."""

    @property
    def model(self) -> ModelInfo:
        """What is served; ``max_tokens`` is the model's context, bounded by the KV pool."""
        ...

    @property
    def kind(self) -> str:
        """Hex digest of everything that decides bits: weights, numeric mode, kernels, ISA or GPU, threads."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks in the KV pool."""
        ...

    @property
    def tokens_per_block(self) -> int: ...

    @property
    def bytes_per_block(self) -> int:
        """KV bytes of one block over all layers."""
        ...

    @property
    def num_host_blocks(self) -> int:
        """Blocks in the pool on the host; 0 where nothing is swapped."""
        ...

    @property
    def num_written_host_blocks(self) -> int:
        """Of these, blocks that were ever written. May be asked on any thread."""
        ...

    @property
    def kv(self) -> KVPools:
        """Both pools as bytes, for copies from worker to worker (``workers.kv_transfer``). No step touches a block
        while it is written there, and none writes one that is read.
        """
        ...

    def add(self, request: RequestSpec) -> None:
        """Make ready for the request's steps (its sampling state)."""
        ...

    def drop(self, request_id: str) -> None:
        """Forget the request. Unknown ids are ignored."""
        ...

    def step(self, plan: StepPlan) -> StepDone:
        """Run one iteration and sample. Blocks until the tokens are on the host.

        Raises: whatever the device raises; the worker process then ends, and its requests go on elsewhere.
        """
        ...

    def copy_out(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copy blocks of the KV pool to the host, the first to the first and so on; returns once they are there.

        Raises: ValueError as ``check_copy`` does; whatever the device raises, as with ``step``.
        """
        ...

    def copy_in(self, host_blocks: Sequence[int], device_blocks: Sequence[int]) -> None:
        """The way back; a step that begins after it has returned finds them. Raises: as ``copy_out``."""
        ...
