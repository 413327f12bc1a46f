"""The open requests of all gateways of a host, as each gateway tells the others in a file while a page is open.

The gateway that has a page open touches the file ``watched``. As long as its time is young, the other gateways write
their requests into files of their own, so nothing is written without an open page. A file that is not renewed, as that
of a gateway that died, is ignored after a while.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from pydantic_core import from_json, to_json

from actorserve.core.gateway.shown import ShownRequest

FOLDER: Final = "dashboard"
"""In the runtime folder."""
LEASE_S: Final = 3.0
_WATCHED: Final = "watched"
_SUFFIX: Final = ".requests"


class HostRequests:
    """This gateway's end, as ``name`` in ``folder``. Without a folder it is the only gateway. ``clock`` gives seconds
    of the system's clock, with which files are dated.

    Raises: OSError, if the folder cannot be made or written.
    """

    def __init__(self, folder: Path | None = None, name: str = "", clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._name = name
        self._clock = clock
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def watch(self) -> None:
        """Have the other gateways tell their requests for the next ``LEASE_S``."""
        if self._folder is not None:
            watched = self._folder / _WATCHED
            watched.touch(mode=0o600)
            self._date(watched)

    def is_watched(self) -> bool:
        """Whether some gateway of the host wants to know the requests of all."""
        return self._folder is not None and self._is_young(self._folder / _WATCHED)

    def tell(self, requests: Sequence[ShownRequest], num_requests: int) -> None:
        """Tell the other gateways of this one's requests, and how many there are in all."""
        if self._folder is None:
            return
        new = self._folder / f"{self._name}.new"
        new.write_bytes(to_json([num_requests, requests]))
        self._date(new)
        new.replace(self._file(self._name))

    def others(self) -> tuple[list[ShownRequest], int]:
        """The requests that the other gateways have told of lately, and how many they have in all."""
        requests: list[ShownRequest] = []
        num_requests = 0
        if self._folder is not None:
            for file in sorted(self._folder.glob(f"*{_SUFFIX}")):
                if file != self._file(self._name) and self._is_young(file):
                    with suppress(FileNotFoundError):
                        number, rows = from_json(file.read_bytes())
                        requests += [ShownRequest(*row) for row in rows]
                        num_requests += number
        return requests, num_requests

    def _file(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{name}{_SUFFIX}"

    def _date(self, file: Path) -> None:
        now = self._clock()
        os.utime(file, (now, now))

    def _is_young(self, file: Path) -> bool:
        try:
            return abs(self._clock() - file.stat().st_mtime) < LEASE_S
        except FileNotFoundError:
            return False
