"""Rows of numbers, of which only those that may still change stay in memory."""

import tempfile
import weakref
from collections.abc import Iterator
from typing import IO, Any, Final, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from actorserve.errors import SimulationError

Page: TypeAlias = npt.NDArray[np.void]
"""Rows with one after the other number; ``page["name"]`` is a column of them."""

_N = TypeVar("_N", int, float)

PAGE_ROWS: Final = 1 << 14


class Rows:
    """Rows, numbered from 0. A full page whose rows are all closed moves to a temporary file.

    A closed row is still read and written, but slowly. The file has no name, so it vanishes with the process; a
    run of less than ``PAGE_ROWS`` rows makes none. ``TMPDIR`` names its folder.
    """

    def __init__(self, dtype: np.dtype[np.void]) -> None:
        self._dtype = dtype
        self._pages: dict[int, Page] = {}  # those in memory, by number
        self._num_open: dict[int, int] = {}  # rows of each of these pages that are not closed
        self._num_rows = 0
        self._file: IO[bytes] | None = None

    def __len__(self) -> int:
        return self._num_rows

    @property
    def num_pages_in_memory(self) -> int:
        return len(self._pages)

    def append(self, row: tuple[float, ...]) -> int:
        """Add an open row. Returns its number."""
        number = self._num_rows
        at, place = divmod(number, PAGE_ROWS)
        if not place:
            self._pages[at] = np.zeros(PAGE_ROWS, self._dtype)
            self._num_open[at] = PAGE_ROWS
        self._pages[at][place] = row
        self._num_rows += 1
        return number

    def close(self, number: int) -> None:
        """The row will hardly change any more. Raises: SimulationError, if its page cannot be written."""
        at = number // PAGE_ROWS
        self._num_open[at] -= 1
        if not self._num_open[at]:
            self._write(at * PAGE_ROWS, self._pages[at])
            del self._pages[at], self._num_open[at]

    def get(self, name: str, number: int) -> Any:
        at, place = divmod(number, PAGE_ROWS)
        page = self._pages.get(at)
        return self._read(number, 1)[name].item(0) if page is None else page[name].item(place)

    def set(self, name: str, number: int, value: float) -> None:
        at, place = divmod(number, PAGE_ROWS)
        page = self._pages.get(at)
        if page is None:
            row = self._read(number, 1)
            row[name] = value
            self._write(number, row)
        else:
            page[name][place] = value

    def pages(self) -> Iterator[Page]:
        """All rows in their order, a page at a time."""
        for first in range(0, self._num_rows, PAGE_ROWS):
            num_rows = min(PAGE_ROWS, self._num_rows - first)
            page = self._pages.get(first // PAGE_ROWS)
            yield self._read(first, num_rows) if page is None else page[:num_rows]

    def _read(self, first: int, num_rows: int) -> Page:
        assert self._file is not None
        self._file.seek(first * self._dtype.itemsize)
        return np.frombuffer(bytearray(self._file.read(num_rows * self._dtype.itemsize)), self._dtype)

    def _write(self, first: int, rows: Page) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed with the rows
                weakref.finalize(self, self._file.close)
            self._file.seek(first * self._dtype.itemsize)
            left = memoryview(rows.tobytes())
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise SimulationError(
                f"cannot write the run's requests to a file in {tempfile.gettempdir()}: {error.strerror}: "
                "expected room for them; TMPDIR names another folder"
            ) from None


class Column(Generic[_N]):
    """One number of each row, read and written like a list."""

    def __init__(self, rows: Rows, name: str) -> None:
        self._rows = rows
        self._name = name

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> _N:
        found: _N = self._rows.get(self._name, range(len(self._rows))[number])
        return found

    def __setitem__(self, number: int, value: _N) -> None:
        self._rows.set(self._name, range(len(self._rows))[number], value)

    def __iter__(self) -> Iterator[_N]:
        for page in self._rows.pages():
            yield from page[self._name].tolist()
