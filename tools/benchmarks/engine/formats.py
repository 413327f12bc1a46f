"""A GGUF model in llama.cpp's other formats, made once by llama.cpp's quantizer and kept in the cache folder."""

import hashlib
import os
import subprocess
from pathlib import Path

from actorserve.model_files.default_model import cache_folder
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.paths import ROOT
from tools.benchmarks.peers.llama_build import LlamaBuild

FORMATS = ("Q4_0", "Q8_0", "F16")


def converted(model: Path, name: str, built: LlamaBuild) -> Path:
    """The model in the format ``name``, one of FORMATS. Raises: BenchError."""
    status = model.stat()
    mark = hashlib.sha256(repr((str(model.resolve()), status.st_size, status.st_mtime_ns)).encode()).hexdigest()[:12]
    folder = cache_folder() / "peers" / "formats"
    target = folder / f"{model.stem}-{mark}.{name}.gguf"
    if target.exists():
        return target
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [
                *(str(built.python), "-P", "-m", "tools.benchmarks.peers.requantize"),
                *(str(model), str(unfinished), name, str(len(os.sched_getaffinity(0)))),
            ],
            env={**os.environ, **built.environment, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode != 0 or not unfinished.exists():
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise BenchError(f"llama.cpp cannot write {model.name} as {name}: {reason[:200]}")
        unfinished.replace(target)
    except OSError as error:
        raise BenchError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        unfinished.unlink(missing_ok=True)
    return target
