"""Builds the native kernels into a file: ``python -m workers.native.build FILE``."""

import os
import sys
import tempfile
from pathlib import Path

from torch.utils.cpp_extension import load

from workers.native import digest_now, flags, sources

_NAME = "actorserve_native"


def build(file: Path) -> None:
    """Compile, check that the library loads, and move it into place whole.

    ``file`` is named by the digest that the calling process has of the sources. If the sources differ, or change
    meanwhile, no library is kept under that name.

    Raises: RuntimeError with the compiler's message, or for changed sources; OSError for a full or unwritable folder.
    """
    _check_sources(file)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix="build-") as folder:
        # The library uses torch's OpenMP runtime, because a second one would compete for cores.
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
            os.fsync(opened.fileno())  # otherwise a power cut may leave the name without the bytes
        built.chmod(0o600)  # the linker follows the umask, and a library that a group may write is not trusted
        os.replace(built, file)


def _check_sources(file: Path) -> None:
    if digest_now() != file.stem:
        raise RuntimeError("the kernels' sources have changed since this program started; start it again")


if __name__ == "__main__":
    build(Path(sys.argv[1]))
