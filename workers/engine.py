"""The engine protocol: what computes tokens, as the worker process sees it.

An engine is synchronous and runs on one thread of its own. Its calls come in the order in which the instance's core
issued them; a request is added before its first step and dropped after its last. The engine holds the KV pool; which
block belongs to whom is decided by the core and stated in every plan.
"""

from typing import Protocol

from actorserve.core.messages import ModelInfo, RequestSpec, StepDone, StepPlan


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
