"""The installed version of Triton, and whether this process interprets its kernels."""

import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
VERSION = tuple(map(int, importlib.metadata.version("triton").split(".")[:2])) if HAS_TRITON else (0, 0)


def run_interpreted(test_file: str) -> None:
    """Run the tests of a file whose names have ``interpreted``, in a process whose Triton interprets."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "interpreted", test_file]
    done = subprocess.run(
        command, check=False, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def row_by_row(a: Any, b: Any, dtype: Any) -> Any:
    """``a @ b`` with one order of additions, so that a row has the same bits in any place, in place of NumPy's."""
    total = np.zeros((a.shape[0], b.shape[1]), dtype)
    for term in range(a.shape[1]):
        total += a[:, term, None].astype(dtype) * b[term].astype(dtype)
    return total


def compile_kernel(
    kernel: Any,
    capability: int,
    pointers: Mapping[str, str],
    constants: Mapping[str, int | None],
    multiples: Collection[str] = (),
    **options: int,
) -> Any:
    """The kernel's machine code (cubin) for a GPU of this capability, made without one. Integers are int32.

    ``pointers``: the types of the arguments that are pointers, aligned to 16 bytes. ``multiples``: the integers that
    are multiples of 16. ``constants``: of them, those that the kernel takes.
    """
    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= {name: kind for name, kind in pointers.items() if name in kernel.arg_names}
    types |= dict.fromkeys(constants, "constexpr")
    aligned = [name for name in kernel.arg_names if name not in constants and (name in pointers or name in multiples)]
    source = compiler.ASTSource(
        kernel,
        types,
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return importlib.import_module("triton").compile(source, target=target, options=options)
