"""The device's own speed, measured in the same run: copies of memory, matrix products, and copies to the host."""

import time
from collections.abc import Callable

import torch

from tools.figures.figure import Figure

_WARM_UP = 2


class Device:
    """A GPU, or the CPU in its place."""

    def __init__(self, name: str) -> None:
        """``name``: ``cuda``, ``cuda:N`` or ``cpu``."""
        self.torch = torch.device(name)

    @property
    def gpu(self) -> str | None:
        """The GPU's name, for the figures; None on a CPU."""
        return torch.cuda.get_device_name(self.torch) if self.torch.type == "cuda" else None

    def wait(self) -> None:
        """Return when the device has done all that it was given."""
        if self.torch.type == "cuda":
            torch.cuda.synchronize(self.torch)

    def seconds(self, work: Callable[[], object], rounds: int) -> list[float]:
        """The times of ``work``, each until the device is done, after some runs that warm up."""
        for _ in range(_WARM_UP):
            work()
        times = []
        for _ in range(rounds):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            times.append(time.perf_counter() - began)
        return times

    def copy_bytes_per_s(self, num_bytes: int, rounds: int) -> Figure:
        """The rate of a copy within the device's memory. A byte that is copied counts twice: read, and written."""
        source = torch.ones(num_bytes, dtype=torch.uint8, device=self.torch)
        target = torch.empty_like(source)
        return Figure.of([2 * num_bytes / s for s in self.seconds(lambda: target.copy_(source), rounds)])

    def flops_per_s(self, width: int, dtype: torch.dtype, rounds: int) -> Figure:
        """The rate of a product of two square matrices of random numbers, in ``dtype``."""
        left, right = (torch.randn(width, width, device=self.torch).to(dtype) for _ in range(2))
        return Figure.of([2 * width**3 / s for s in self.seconds(lambda: left @ right, rounds)])

    def host_bytes_per_s(self, num_bytes: int, rounds: int, *, out: bool) -> Figure:
        """The rate of one cudaMemcpyAsync between the device and pinned memory; on a CPU, of a copy."""
        here = torch.ones(num_bytes, dtype=torch.uint8, device=self.torch)
        there = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=self.torch.type == "cuda")
        source, target = (here, there) if out else (there, here)
        work = lambda: target.copy_(source, non_blocking=True)  # noqa: E731 - a def would hide that it is one call
        return Figure.of([num_bytes / s for s in self.seconds(work, rounds)])
