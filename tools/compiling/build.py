"""Compiles a copy of the sources: ``python -m tools.compiling.build FOLDER``, in the folder of the copy."""

import sys
from pathlib import Path

from tools.compiling.builds import compiled_sources


def build(folder: Path) -> None:
    """Leave the built modules in ``folder``, each as deep as its source. Raises: what the compilers raise."""
    from mypyc.build import mypycify
    from setuptools import setup

    sources = [str(file) for file in compiled_sources(Path.cwd())]
    extensions = mypycify(sources, opt_level="2", debug_level="0", multi_file=True)
    setup(
        name="compiled",
        packages=[],
        ext_modules=extensions,
        script_args=["--quiet", "build_ext", "--build-lib", str(folder), "--build-temp", "build"],
    )


if __name__ == "__main__":
    build(Path(sys.argv[1]))
