"""Tests of Triton kernels: in the interpreter, in a process of its own, and on a GPU."""

import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
VERSION = tuple(map(int, importlib.metadata.version("triton").split(".")[:2])) if HAS_TRITON else (0, 0)
TIMEOUT_S = 900
"""Long enough for a machine that others compute on as well."""

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="the package triton is not installed")
interpreted = pytest.mark.skipif(not (HAS_TRITON and INTERPRETED), reason="run in a process that interprets kernels")
"""Marks a test whose name has the word ``interpreted``."""


def on_cuda(function: Any) -> Any:
    """Marks a test that runs compiled kernels."""
    skip = pytest.mark.skipif(
        not HAS_TRITON or INTERPRETED or not torch.cuda.is_available(), reason="needs CUDA and triton"
    )
    return pytest.mark.gpu(skip(function))


def needs_interpreter(function: Any) -> Any:
    """Marks a test that calls `run_interpreted`."""
    compiles = pytest.mark.skipif(
        not HAS_TRITON or INTERPRETED, reason="needs the package triton, and a process that compiles"
    )
    counts = pytest.mark.skipif(
        VERSION < (3, 7), reason="before 3.7 Triton's interpreter cannot count loops with today's NumPy"
    )
    return compiles(counts(function))


def run_interpreted(file: str) -> None:
    """Run the file's tests with ``interpreted`` in their names in a process whose Triton interprets."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "interpreted", file]
    done = subprocess.run(
        command,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def row_by_row(a: Any, b: Any, dtype: Any) -> Any:
    """``a @ b`` with one order of additions, so that a row has the same bits in any place."""
    total = np.zeros((a.shape[0], b.shape[1]), dtype)
    for term in range(a.shape[1]):
        total += a[:, term, None].astype(dtype) * b[term].astype(dtype)
    return total


def by_place(a: Any, b: Any, dtype: Any) -> Any:
    """``a @ b`` with last bits that depend on a row's place, more than in any BLAS."""
    product = row_by_row(a, b, dtype)
    product[1::2] = np.nextafter(product[1::2], dtype.type(np.inf))
    return product
