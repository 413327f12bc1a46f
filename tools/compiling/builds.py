"""Where a build lies, what it is made from, and how Python imports its modules."""

import hashlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from actorserve.local_trust import trusted_folder
from actorserve.model_files.default_model import cache_folder

ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("actorserve/core", "actorserve/sim")
# The wire reads the annotations of the vocabulary, and mypyc's classes have none.
_VOCABULARY = ("messages", "effects.py", "recipes.py", "profile.py", "config.py", "__init__.py")
_LOOP = ("simulation.py", "engine_model.py", "timeline.py", "clients.py", "instance_metrics.py")


def compiled_sources(root: Path) -> list[Path]:
    """The files that are compiled, relative to ``root``: the core but for its vocabulary, and the simulator's loop."""
    core = (root / _FOLDERS[0]).rglob("*.py")
    files = [file for file in core if file.name not in _VOCABULARY and file.parent.name not in _VOCABULARY]
    files += [root / _FOLDERS[1] / name for name in _LOOP]
    return sorted(file.relative_to(root) for file in files)


def digest_of(root: Path, compiler: str) -> str:
    """Digest of all sources of the core and the simulator, which the compiled ones build on, and of the tools."""
    hashed = hashlib.sha256(f"{sys.version} {EXTENSION_SUFFIXES[0]} mypy {compiler}".encode())
    for folder in _FOLDERS:
        for file in sorted((root / folder).rglob("*.py")):
            hashed.update(f"\0{file.relative_to(root)}\0".encode() + file.read_bytes())
    for file in (Path(__file__), Path(__file__).with_name("build.py")):
        hashed.update(b"\0" + file.read_bytes())
    return hashed.hexdigest()[:24]


def build_folder(root: Path = ROOT) -> Path | None:
    """Where the build of the sources on the disk now lies, if it was made. None without mypy, which makes builds.

    Raises: UntrustedError if others could have written it.
    """
    try:
        compiler = version("mypy")
    except PackageNotFoundError:
        return None
    folder = cache_folder() / "compiled" / digest_of(root, compiler)
    return trusted_folder(folder) if folder.exists() else folder


class Finder(MetaPathFinder):
    """Finds the modules of a build, whose files lie as deep in ``folder`` as their sources do in the repository."""

    def __init__(self, folder: Path) -> None:
        suffix = EXTENSION_SUFFIXES[0]
        self._files = {
            ".".join(file.relative_to(folder).parts).removesuffix(suffix): file for file in folder.rglob(f"*{suffix}")
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._files.get(fullname)
        if file is None:
            return None
        return spec_from_file_location(fullname, file, loader=ExtensionFileLoader(fullname, str(file)))
