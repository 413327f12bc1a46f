"""The native kernels are built once per machine and are optional: without them there is a reason, not a failure."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from actorserve.model_files.default_model import cache_folder
from workers import native
from workers.native import build

SAY = "from workers import native; print(native.load(), native.describe())"


def say(cache: Path, **environment: str) -> str:
    """The results of ``native.load`` and ``native.describe`` in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", SAY],
        env={**os.environ, "ACTORSERVE_CACHE": str(cache), **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return done.stdout.strip()


def test_without_a_compiler_there_is_a_reason(tmp_path: Path) -> None:
    """On a machine without a C++ compiler the reason names the missing program."""
    assert native.isa(), "the tests' machines have AVX2"
    said = say(tmp_path, CXX="no-such-compiler")
    assert said.startswith("False")
    assert "no C++ compiler no-such-compiler" in said


def test_a_failing_compiler_is_quoted_and_leaves_nothing(tmp_path: Path) -> None:
    """The compiler's error becomes the reason, in one line, and no unfinished library stays behind."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\ncase "$1" in -*version) exec g++ "$1";; esac\n'
        'echo "rows.cpp:1: error: out of patience" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    assert "error: out of patience" in say(tmp_path / "cache", CXX=str(compiler))
    assert [file.name for file in (tmp_path / "cache" / "native").iterdir()] == ["build.lock"]


def test_an_unwritable_cache_is_named(tmp_path: Path) -> None:
    """If the cache cannot be written to, the reason names its folder."""
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file" / "native") in say(tmp_path / "file")


def test_a_cpu_without_avx2_uses_torch(tmp_path: Path) -> None:
    """On a CPU without AVX2 nothing is built."""
    assert "AVX2" in say(tmp_path, ATEN_CPU_CAPABILITY="default")
    assert not (tmp_path / "native").exists()


@pytest.mark.skipif(not native.load(), reason=native.describe())
@pytest.mark.parametrize("num_bytes", [0, 1, 39, 63, 64, 0.01, 0.6, 0.999])
def test_a_damaged_library_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int | float
) -> None:
    """A library that ends early is replaced, because loading it would kill the process; leftovers and old ones go.

    ``num_bytes``: how much of the library is left, also as a share.
    """
    whole = (cache_folder() / "native" / f"{native.digest()}.so").read_bytes()
    folder = tmp_path / "native"
    (folder / "build-killed").mkdir(parents=True)
    (folder / f"{native.digest()}.so").write_bytes(
        whole[: num_bytes if isinstance(num_bytes, int) else int(len(whole) * num_bytes)]
    )
    for name, days in (("old", 31), ("recent", 29)):
        (folder / f"{name}.so").write_text("")
        then = time.time() - days * 24 * 3600
        os.utime(folder / f"{name}.so", (then, then))
    monkeypatch.setattr(native, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(native, "_build", lambda file: file.write_bytes(whole))
    file = native._library()
    assert file.read_bytes() == whole
    assert sorted(found.name for found in folder.iterdir()) == sorted(["build.lock", "recent.so", file.name])
    monkeypatch.setattr(native, "_build", None)
    assert native._library() == file


def test_a_library_that_cannot_be_loaded_is_a_reason(tmp_path: Path) -> None:
    """A file that looks whole but is no library gives a reason, and the worker goes on without it."""
    folder = tmp_path / "native"
    folder.mkdir()
    (folder / f"{native.digest()}.so").write_bytes(b"\x7fELF".ljust(64, b"\0"))
    said = say(tmp_path)
    assert said.startswith("False")
    assert "cannot be loaded" in said


def test_a_library_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is synced to the disk before it gets its name, so a power cut leaves no name without the bytes."""
    done: list[str] = []

    def compile_nothing(*, name: str, build_directory: str, **_: object) -> None:
        (Path(build_directory) / f"{name}.so").write_text("")

    monkeypatch.setattr(build, "load", compile_nothing)
    monkeypatch.setattr("os.fsync", lambda _: done.append("fsync"))
    monkeypatch.setattr("os.replace", lambda *_: done.append("replace"))
    build.build(tmp_path / f"{native.digest()}.so")
    assert done == ["fsync", "replace"]


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_library_of_changed_sources_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """If a source is edited before or while the compiler runs, no library of the old name appears."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for source in native.sources(".cpp", ".h"):
        shutil.copy(source, folder)
    monkeypatch.setattr(native, "_FOLDER", folder)
    file = tmp_path / f"{native.digest_now()}.so"
    compiled: list[str] = []

    def edit() -> None:
        (folder / "rows.cpp").write_text("// edited")

    def compile_nothing(*, name: str, build_directory: str, **_: object) -> None:
        compiled.append(name)
        (Path(build_directory) / f"{name}.so").write_text("")
        if when == "while":
            edit()

    monkeypatch.setattr(build, "load", compile_nothing)
    if when == "before":
        edit()
    with pytest.raises(RuntimeError, match="sources have changed"):
        build.build(file)
    assert bool(compiled) == (when == "while")
    assert [left.name for left in tmp_path.iterdir()] == ["sources"]


def test_avx2_can_be_forced() -> None:
    """``ATEN_CPU_CAPABILITY=avx2`` chooses the kernels for AVX2 on any CPU."""
    done = subprocess.run(
        [sys.executable, "-c", "from workers import native; print(native.isa())"],
        env={**os.environ, "ATEN_CPU_CAPABILITY": "avx2"},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert done.stdout.strip() == "avx2"


@pytest.mark.skipif(not native.load(), reason=native.describe())
def test_it_says_what_it_found() -> None:
    """The description names the instruction set."""
    assert native.isa() in native.describe()
