"""What every way of reading another worker's KV looks like."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from actorserve.core.messages import KVTicket

Pace = Callable[[int], None]
"""Called with a number of bytes before these are copied; returns when they may be."""


class Link(Protocol):
    """Reads one worker's blocks into the pools here. Used by one thread at a time."""

    def read(
        self, ticket: KVTicket, num_skipped: int, blocks: Sequence[int], pace: Pace, *, into_host: bool = False
    ) -> None:
        """Copy the ticket's blocks but the first ``num_skipped`` into ``blocks``, in order: of the device's pool, or
        of the host's.

        Raises: TransferError; then nothing is written any more.
        """
        ...

    def close(self) -> None:
        """Let go of the source's memory, or of the connection to it."""
        ...


def this_host() -> str:
    """A name for this boot of this machine, and for the processes in it that see each other under /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
