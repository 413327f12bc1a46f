"""Triton kernels compiled for a GPU without one."""

import importlib
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any


@dataclass(frozen=True)
class Compiled:
    """A kernel's code for one GPU."""

    ptx: str
    num_registers: int
    num_spilled_bytes: int


def compile_kernel(
    name: str,
    constants: Mapping[str, Any],
    types: Mapping[str, str],
    capability: int,
    num_warps: int = 4,
    num_stages: int = 2,
) -> Compiled:
    """Compile without a GPU. ``name``: ``module:kernel``. ``types``: of arguments that are neither constants nor int32.

    Integers and pointers are multiples of 16, as the engine's strides and tensors are.
    """
    triton, compiler = importlib.import_module("triton"), importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    module, _, attribute = name.partition(":")
    kernel = getattr(importlib.import_module(module), attribute)
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "i32") for argument in kernel.arg_names
    }
    places = {argument: (number,) for number, argument in enumerate(kernel.arg_names)}
    aligned = {
        places[parameter.name]: [["tt.divisibility", 16]]
        for parameter in kernel.params
        if (signature[parameter.name].startswith("*") and not parameter.do_not_specialize_on_alignment)
        or (signature[parameter.name] == "i32" and not parameter.do_not_specialize)
    }
    source = compiler.ASTSource(kernel, signature, {places[n]: value for n, value in constants.items()}, aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=target, options=options)
    tools = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tools / "cuobjdump"), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    return Compiled(compiled.asm["ptx"], int(numbers["REG"]), int(numbers["STACK"]) + int(numbers["LOCAL"]))
