"""Compiles what Python code launches, for any GPU, on a machine without one.

The code under test runs as it is, with tensors on torch's ``meta`` device, which have shapes and no numbers. Each
launch of a Triton kernel becomes a compilation with exactly the types, constants and options of that launch.
"""

import importlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tools.benchmarks.common.errors import BenchError

_WARP = 32
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores")
_TARGET = re.compile(r"^\.target (sm_\w+)", re.MULTILINE)
_MULTIPLY = re.compile(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)\.[\w.:]*?(?:(m\d+n\d+k\d+)|kind::(\w+))")

_SHORT = {"wgmma.mma_async": "wgmma", "tcgen05.mma": "tcgen05"}


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel in one configuration for one GPU.

    ``registers`` of a thread; ``spilled_bytes`` of a thread that registers have no room for; ``shared_bytes`` of a
    program; ``instructions`` by which it multiplies matrices, each with its shape; whether the assembler ``fuses``
    products and sums; ``ptx`` is the compiler's text.
    """

    kernel: str
    capability: int
    warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions: tuple[str, ...]
    fuses: bool
    ptx: str


class _NoDevice:
    """A driver of a GPU that is not there: it names the GPU, and runs nothing."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability  # Triton keeps compiled kernels by this number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return _module("triton.backends.compiler").GPUTarget("cuda", self._capability, _WARP)


def compile_launches(function: Callable[[], object], capability: int) -> list[Compiled]:
    """What ``function()`` launches, compiled for GPUs of compute capability ``capability / 10``; each configuration
    once, in order.

    Raises: BenchError if Triton is not installed, or the assembler fails; Triton's errors if a kernel does not compile.
    """
    kernels: dict[str, Any] = {}
    with _recording(capability, kernels):
        function()
    return [_facts(kernel, capability) for kernel in kernels.values()]


@contextmanager
def _recording(capability: int, kernels: dict[str, Any]) -> Iterator[None]:
    jit, driver = _module("triton.runtime.jit").JITFunction, _module("triton.runtime.driver").driver
    run = jit.run

    def compile_only(kernel: Any, *args: Any, grid: object, warmup: bool, **options: Any) -> Any:
        compiled = run(kernel, *args, grid=grid, warmup=True, **options)
        return kernels.setdefault(compiled.hash, compiled)

    with patch.object(jit, "run", compile_only), patch.object(driver, "_active", _NoDevice(capability)):
        yield


def _facts(kernel: Any, capability: int) -> Compiled:
    ptx = kernel.asm["ptx"]
    said = _assemble(ptx, capability, fuses=kernel.metadata.enable_fp_fusion)
    registers, spills = _REGISTERS.search(said), _SPILLS.search(said)
    if registers is None or spills is None:
        raise BenchError(f"the assembler does not tell the registers of {kernel.metadata.name}: {said}")
    shapes = {f"{_SHORT.get(name, name)} {shape or kind}" for name, shape, kind in _MULTIPLY.findall(ptx)}
    return Compiled(
        kernel=kernel.metadata.name.strip("_"),
        capability=capability,
        warps=kernel.metadata.num_warps,
        registers=int(registers[1]),
        spilled_bytes=int(spills[1]),
        shared_bytes=kernel.metadata.shared,
        instructions=tuple(sorted(shapes)),
        fuses=kernel.metadata.enable_fp_fusion,
        ptx=ptx,
    )


def _assemble(ptx: str, capability: int, fuses: bool) -> str:
    """What the assembler says about the code. Raises: BenchError."""
    tools = _module("triton.knobs").nvidia
    assembler = tools.ptxas_blackwell if capability >= 100 else tools.ptxas
    target = _TARGET.search(ptx)
    if target is None:
        raise BenchError("the compiler's text names no target")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(ptx, encoding="utf-8")
        options = ["-v", f"--gpu-name={target[1]}", *([] if fuses else ["--fmad=false"])]
        done = subprocess.run(
            [assembler.path, *options, str(file), "-o", str(Path(folder, "kernel.cubin"))],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise BenchError(f"the assembler fails: {done.stderr}")
    return done.stdout + done.stderr


def _module(name: str) -> Any:
    """Triton's module of that name. Raises: BenchError."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BenchError(f"compiling kernels needs the package triton: {error}") from None
