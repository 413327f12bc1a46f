"""Numbers that the gateways of one host share: each process writes its own, and every process can read all of them.

A process has two files. ``NAME.values`` is an array of doubles, which the process maps into its memory, so that
counting costs one store. ``NAME.names`` has one line of JSON per number, appended when the number is first needed. Only
one process of a name runs at a time. Its successor continues its numbers, so what a dead process counted is not lost.
"""

import json
import mmap
import os
import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

Name = tuple[str, ...]

COUNTS: Final = "counts"
OPEN_COUNTS: Final = "open-requests"
"""The folders, in the runtime folder, of what gateways have counted, and of the requests that are open now."""

_CAPACITY: Final = 8192
_DOUBLE: Final = struct.Struct("=d")
_DOUBLE_BYTES: Final = _DOUBLE.size


class HostCounts:
    """The numbers of this process, which is called ``name`` in ``folder``. Without a folder, it is the only process.

    ``values[cell(NAME)]`` is a number; use it from one thread only. Unless ``keeps``, the numbers begin at 0.

    Raises: OSError, if the files cannot be made.
    """

    def __init__(self, folder: Path | None = None, name: str = "", *, keeps: bool = True) -> None:
        self._folder = folder
        self._names: dict[Name, int] = {}
        self._read: dict[Path, tuple[tuple[int, int], dict[Name, int]]] = {}  # names by file, as of its inode and size
        if folder is None:
            self.values = memoryview(bytearray(_CAPACITY * _DOUBLE_BYTES)).cast("d")
            return
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._names_file, values = folder / f"{name}.names", folder / f"{name}.values"
        if not keeps:
            self._names_file.unlink(missing_ok=True)
            values.unlink(missing_ok=True)
        with values.open("ab") as file:
            file.truncate(_CAPACITY * _DOUBLE_BYTES)
        with values.open("r+b") as file:
            self.values = memoryview(mmap.mmap(file.fileno(), _CAPACITY * _DOUBLE_BYTES)).cast("d")
        self._names = _read_names(self._names_file)
        # The last process may not have finished a line. Other processes may be reading, so the file is replaced.
        whole = folder / f"{name}.names-new"
        whole.write_text("".join(map(_line, self._names)), encoding="utf-8")
        whole.replace(self._names_file)

    def cell(self, name: Name) -> int:
        """The index of this number in ``values``. There is room for some thousands of names."""
        index = self._names.get(name)
        if index is None:
            index = self._names[name] = len(self._names)
            if self._folder is not None:
                with self._names_file.open("a", encoding="utf-8") as file:
                    file.write(_line(name))
        return index

    def total(self, name: Name) -> float:
        """The sum of one number over all processes of the host. It costs some 10 microseconds for each of them."""
        if self._folder is None:
            index = self._names.get(name)
            return 0.0 if index is None else self.values[index]
        return sum(self._value_in(file, name) for file in self._folder.glob("*.names"))

    def _value_in(self, file: Path, name: Name) -> float:
        try:
            facts = file.stat()
            version = (facts.st_ino, facts.st_size)
            known = self._read.get(file)
            if known is None or known[0] != version:
                known = self._read[file] = (version, _read_names(file))
            index = known[1].get(name)
            if index is None:
                return 0.0
            with file.with_suffix(".values").open("rb", buffering=0) as values:
                data = os.pread(values.fileno(), _DOUBLE_BYTES, index * _DOUBLE_BYTES)
        except FileNotFoundError:
            return 0.0  # a process that begins at 0 again is just removing its files
        return float(_DOUBLE.unpack(data)[0]) if len(data) == _DOUBLE_BYTES else 0.0

    def totals(self) -> Mapping[Name, float]:
        """The sums over all processes of the host, by name, with those of processes that have ended."""
        if self._folder is None:
            return {name: self.values[index] for name, index in self._names.items()}
        sums: Counter[Name] = Counter()
        for file in sorted(self._folder.glob("*.names")):
            try:
                values = memoryview(file.with_suffix(".values").read_bytes()).cast("d")
            except FileNotFoundError:
                continue  # a process that begins at 0 again is just removing its files
            for name, index in _read_names(file).items():
                sums[name] += values[index]  # type: ignore[assignment]  # a Counter also holds floats
        return sums


def _line(name: Name) -> str:
    return json.dumps(name) + "\n"


def _read_names(file: Path) -> dict[Name, int]:
    try:
        lines = file.read_text(encoding="utf-8").split("\n")[:-1]  # the last line may be unfinished
    except FileNotFoundError:
        return {}
    return {tuple(json.loads(line)): index for index, line in enumerate(lines)}
