"""The installed version of Triton, and whether this process interprets its kernels."""

import importlib.metadata
import importlib.util
import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
VERSION = tuple(map(int, importlib.metadata.version("triton").split(".")[:2])) if HAS_TRITON else (0, 0)
