"""The installed version of Triton, and whether this process interprets its kernels."""

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from typing import Any

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
VERSION = tuple(map(int, importlib.metadata.version("triton").split(".")[:2])) if HAS_TRITON else (0, 0)


def compile_kernel(
    kernel: Any, capability: int, pointers: Mapping[str, str], constants: Mapping[str, int], **options: int
) -> Any:
    """The kernel's machine code (cubin) for a GPU of this capability, made without one. Integers are int32.

    ``pointers``: the types of the arguments that are pointers. ``constants``: of them, those that the kernel takes.
    """
    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(constants, "constexpr")
    types |= {name: kind for name, kind in pointers.items() if name in kernel.arg_names}
    source = compiler.ASTSource(kernel, types, {(kernel.arg_names.index(n),): v for n, v in constants.items()})
    return importlib.import_module("triton").compile(source, target=target, options=options)
