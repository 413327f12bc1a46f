"""A fake libnvidia-ml.so.1, which the tests build from C, for the real nvidia-ml-py."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pynvml
import pytest

WATT = 1000  # milliwatts
GPU_IS_LOST = pynvml.NVML_ERROR_GPU_IS_LOST
NO_PERMISSION = pynvml.NVML_ERROR_NO_PERMISSION


class FakeDriver:
    """GPUs of 200 to 700 W, called GPU-0, GPU-1, ...; numbers are written and read as files. "0-mig" is a MIG slice of
    GPU-0, called MIG-0, which is there once it has a "memory_total".
    """

    def __init__(self, library: Path, folder: Path, count: int) -> None:
        self.library = library
        self.folder = folder
        self.put(None, "count", count)
        for index in range(count):
            for name, value in (("least", 200), ("most", 700), ("usual", 700), ("limit", 700), ("draw", 100)):
                self.put(index, name, value * WATT)
            self.put(index, "reasons", 0)
            self.put(index, "processes", 1)

    @property
    def environment(self) -> dict[str, str]:
        """For a process that is to load this driver."""
        return {"LD_LIBRARY_PATH": str(self.library.parent), "FAKE_NVML": str(self.folder)}

    def put(self, gpu: int | str | None, name: str, value: int) -> None:
        """A number of a GPU, or of the driver."""
        file = self.folder / ("" if gpu is None else str(gpu)) / name
        file.parent.mkdir(exist_ok=True)
        unfinished = file.with_suffix(".new")
        unfinished.write_text(f"{value}\n")
        unfinished.replace(file)

    def remove(self, gpu: int, name: str) -> None:
        """The GPU does not tell this number any more."""
        (self.folder / str(gpu) / name).unlink()

    def limit(self, gpu: int) -> float:
        """The GPU's power limit in watts."""
        return int((self.folder / str(gpu) / "limit").read_text() or 0) / WATT

    def load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let nvidia-ml-py in this process use the library."""
        monkeypatch.setenv("FAKE_NVML", str(self.folder))
        monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(self.library)))
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})


def build_library(folder: Path) -> Path:
    """The library, built by the system's compiler. Skips the test if there is none."""
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C compiler: {compiler} is not found, and the fake driver is built by it")
    library = folder / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("fake_nvml.c")
    words = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, source]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return library
