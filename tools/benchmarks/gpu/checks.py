"""What a machine lacks to serve on its GPU."""

import importlib.util
import shutil
import sysconfig
from pathlib import Path

import torch

from workers.cuda_version import why_no_cuda
from workers.devices import DriverError, usable_devices


def missing() -> str | None:
    """What is missing, in one line that says what to do; None if nothing is.

    Triton compiles a launcher for each kernel with the C compiler, against Python's headers.
    """
    try:
        devices = usable_devices()
    except DriverError as error:
        return str(error)
    if not torch.cuda.is_available():
        return f"torch finds no GPU: {why_no_cuda()}"
    if not devices:
        return "the NVIDIA driver shows no GPU; CUDA_VISIBLE_DEVICES may hide it"
    if importlib.util.find_spec("triton") is None:
        return "triton is missing, which torch's builds for CUDA bring along: remove .venv and run this again"
    if shutil.which("gcc") is None and shutil.which("clang") is None:
        return "there is no C compiler, which Triton needs: apt install gcc"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python.h is missing, which Triton needs: apt install python3-dev"
    return None
