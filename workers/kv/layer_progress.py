"""How far an engine's iterations are, layer by layer, where other threads and processes can see it.

It is one number of 8 bytes in shared memory, and it only grows, because an engine's iterations end in the order of
their ids. So a reader needs no lock, and may look at any time.
"""

import mmap
import time
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from actorserve.errors import ActorserveError
from workers.kv.shared_memory import SharedMemory, attach

_NUM_BYTES: Final = 8
_LAYERS: Final = 2**16  # more than any model has
_LOOK_BOUNDS_S: Final = (0.0005, 0.005)  # between two looks
_LOOKS: Final = 20  # at most so many a layer, because each takes time from what computes

PATIENCE_S: Final = 60.0
"""An iteration that gets no further for so long counts as stuck. A layer of a large model on a CPU takes seconds."""


def mark(step_id: int, num_layers: int) -> int:
    """What the number is at least, once iteration ``step_id`` has written the KV of its first ``num_layers`` layers."""
    return step_id * _LAYERS + num_layers


class StuckError(ActorserveError):
    """An iteration gets no further."""


class Seen(Protocol):
    """Progress as a reader sees it."""

    @property
    def value(self) -> int: ...


class LayerProgress:
    """The progress of an engine in this process, whose model has ``num_layers`` layers. One thread reports it."""

    def __init__(self, num_layers: int) -> None:
        """Raises: OSError if the kernel cannot provide the memory."""
        self.num_layers = num_layers
        self.memory = SharedMemory(_NUM_BYTES)
        self._number = memoryview(self.memory.buffer).cast("Q")

    @property
    def value(self) -> int:
        return self._number[0]

    @property
    def shown(self) -> str:
        """The name by which another process can open it (``SeenProgress``)."""
        return self.memory.shown

    def report(self, step_id: int, num_layers: int) -> None:
        """Iteration ``step_id`` has written the KV of its first ``num_layers`` layers."""
        self._number[0] = mark(step_id, num_layers)

    def end(self, step_id: int) -> None:
        """Iteration ``step_id`` has written all KV."""
        self.report(step_id, self.num_layers)

    def of_step(self, step_id: int) -> Callable[[int], None]:
        """What reports a number of layers of iteration ``step_id``."""
        return partial(self.report, step_id)

    def restart(self) -> None:
        """Iterations are numbered from 1 again, because those so far only measured the engine."""
        self._number[0] = 0


class SeenProgress:
    """The progress of an engine in another process on this host."""

    def __init__(self, shown: str) -> None:
        """Raises: ValueError if the memory does not exist."""
        self._memory: mmap.mmap = attach(shown, _NUM_BYTES)
        self._number = memoryview(self._memory).cast("Q")

    @property
    def value(self) -> int:
        return self._number[0]


def wait_until(progress: Seen, least: int, check: Callable[[], None], patience_s: float = PATIENCE_S) -> None:
    """Return when the progress is at ``least``. ``check`` is called now and then, and may raise.

    Raises: StuckError if the progress stands still for ``patience_s``.
    """
    value, since = progress.value, time.monotonic()
    while value < least:
        check()
        least_s, most_s = _LOOK_BOUNDS_S
        time.sleep(min(max(least_s, (time.monotonic() - since) / _LOOKS), most_s))
        before, value = value, progress.value
        if value != before:
            since = time.monotonic()
        elif time.monotonic() - since > patience_s:
            raise StuckError(f"the source's iteration has got no further for {patience_s:g} s")
