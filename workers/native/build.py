"""Builds the native kernels into the file that is named: ``python -m workers.native.build FILE``."""

import os
import sys
import tempfile
from pathlib import Path

from torch.utils.cpp_extension import load

from workers.native import digest_now, flags, sources

_NAME = "actorserve_native"


def build(file: Path) -> None:
    """Compile, load once to see that it loads, and put the library into place whole.

    ``file`` is named by the digest of what the library is made from, as whoever asks for it knows them. Sources that
    are others, or that change meanwhile, are never kept under that name.

    Raises: RuntimeError with the compiler's words, or for changed sources; OSError for a full or unwritable folder.
    """
    _check_sources(file)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix="build-") as folder:
        # The OpenMP runtime is torch's own, found when the library is loaded: a second one would fight it for cores.
        load(
            name=_NAME,
            sources=[str(source) for source in sources(".cpp")],
            extra_cflags=list(flags()),
            build_directory=folder,
            is_python_module=False,
        )
        _check_sources(file)
        built = Path(folder) / f"{_NAME}.so"
        with built.open("rb") as opened:
            os.fsync(opened.fileno())  # else a power cut may leave the name without the bytes
        os.replace(built, file)


def _check_sources(file: Path) -> None:
    if digest_now() != file.stem:
        raise RuntimeError("their sources have changed since this program started; start it again")


if __name__ == "__main__":
    build(Path(sys.argv[1]))
