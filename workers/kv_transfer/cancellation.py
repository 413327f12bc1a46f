"""How a read of KV is told that it is no longer wanted."""

import contextlib
import socket
import threading
from collections.abc import Iterator

from workers.kv_transfer.errors import TransferError


class Cancellation:
    """Ends one read early: one thread reads, and any thread may cancel."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the following two fields
        self._reason: str | None = None
        self._stream: socket.socket | None = None

    @property
    def is_cancelled(self) -> bool:
        return self._reason is not None

    def cancel(self, reason: str) -> None:
        """Make the read fail soon with ``reason``, whether it has begun or not. Never waits. A first reason stays."""
        with self._lock:
            self._reason = self._reason or reason
            if self._stream is not None:
                with contextlib.suppress(OSError):  # not connected yet, or not any more
                    self._stream.shutdown(socket.SHUT_RDWR)

    def check(self) -> None:
        """Raises: TransferError if the read was cancelled."""
        if self._reason is not None:
            raise TransferError(self._reason)

    @contextlib.contextmanager
    def ends(self, stream: socket.socket) -> Iterator[None]:
        """While the block runs, a cancel also ends what waits for ``stream``. Raises: as ``check``."""
        with self._lock:
            self.check()
            self._stream = stream
        try:
            yield
        finally:
            with self._lock:
                self._stream = None
