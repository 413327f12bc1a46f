"""Prepared weights are kept whole or not at all, and a start from them gives the same bits."""

import errno
import fcntl
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actorserve.core.messages import StepPlan
from workers.engine_options import EngineOptions
from workers.engines.torch_engine import TorchEngine
from workers.weights import prepared, sources
from workers.weights.prepared import PreparedWeights, PreparedWriter, prepared_file

PLAN = StepPlan(0, ("a",), (0,), (tuple(range(20)),), ((0, 1),), (True,))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder for one test."""
    monkeypatch.setattr("workers.weights.prepared.cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "prepared"


def engine(model: Any, dtype: str = "int8") -> TorchEngine:
    return TorchEngine(model.description, EngineOptions(dtype=dtype, kv_cache_bytes=2**20))


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.weights"))


def test_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    """Every dtype and shape survives the file, at addresses aligned for vector loads."""
    tensors = {
        "bytes": torch.arange(-5, 6, dtype=torch.int8),
        "matrix": torch.randn(3, 5),
        "half": torch.randn(7).bfloat16(),
        "number": torch.tensor(3, dtype=torch.int32),
        "nothing": torch.empty(0),
    }
    with PreparedWriter(tmp_path / "w") as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.finish({"digest": "d"})
    read = PreparedWeights(tmp_path / "w")
    assert read.facts == {"digest": "d"}
    for name, tensor in tensors.items():
        found = read.get(name)
        assert found is not None
        assert torch.equal(found, tensor)
        assert found.dtype == tensor.dtype
        assert found.data_ptr() % 64 == 0 or not found.numel()
    assert read.get("unknown") is None


def test_an_unfinished_file_does_not_appear(tmp_path: Path) -> None:
    """A writer that is left early leaves nothing behind."""
    with PreparedWriter(tmp_path / "w") as writer:
        writer.add("a", torch.ones(3))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_the_second_start_maps_kept_weights(
    make_model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """A start from kept weights reads none of the model's tensors, is of the same kind, and gives the same bits."""
    model = make_model(attention_bias=True)
    first = engine(model, dtype)
    assert len(kept(folder)) == 1
    monkeypatch.setattr(sources.SafetensorsSource, "read", None)
    second = engine(model, dtype)
    assert second.kind == first.kind
    assert torch.equal(second.logits(PLAN), first.logits(PLAN))


def test_floats_and_dummies_are_not_kept(make_model: Any, folder: Path) -> None:
    """Float weights are not kept, because they are read fast."""
    engine(make_model(), "float32")
    assert kept(folder) == []


def test_another_mode_or_model_has_another_file(make_model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed model, or another way to compute it, never uses weights that were kept before."""
    model = make_model()
    description = model.description
    before = prepared_file(description, "int8")
    assert prepared_file(description, "int4") != before
    assert prepared_file(replace(description, tensors=description.tensors[1:]), "int8") != before
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "another")
        assert prepared_file(description, "int8") != before
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
        assert prepared_file(description, "int8") != before
    os.utime(description.weight_files[0], ns=(1, 1))
    assert prepared_file(description, "int8") != before


def test_another_version_of_the_preparing_code_has_another_file(
    make_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that another version of any of the files that prepare them has kept are not used."""
    root = Path(prepared.__file__).parents[1]
    copy = tmp_path / "workers"
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(prepared, "__file__", str(copy / "weights" / "prepared.py"))
    description = make_model().description
    before = prepared_file(description, "int8")
    for name in ("weights/decoder_weights.py", "kernels/numerics.py", "kernels/quantized_linear.py", "models/llama.py"):
        with (copy / name).open("a") as file:
            file.write("# another version\n")
        after = prepared_file(description, "int8")
        assert after != before, name
        before = after
    with (copy / "memory.py").open("a") as file:
        file.write("# another version\n")
    assert prepared_file(description, "int8") == before


def cannot_map(*_: object, **__: object) -> None:
    raise RuntimeError("unable to mmap")


def test_a_layer_missing_from_the_file_is_prepared(
    make_model: Any, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that the kept file lacks is made from the model's file, also if the cache is read-only."""
    model = make_model()
    expected = engine(model).logits(PLAN)
    (file,) = kept(folder)
    file.write_bytes(file.read_bytes().replace(b'"lm_head"', b'"lm_tail"'))

    def read_only(*_: object) -> None:
        raise PermissionError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("os.utime", read_only)
    assert torch.equal(engine(model).logits(PLAN), expected)
    assert "WARNING" not in caplog.text


@pytest.mark.parametrize("damage", ["empty", "short", "index", "facts", "no facts", "no tensors", "unmappable"])
def test_a_damaged_file_is_prepared_anew(
    make_model: Any, folder: Path, damage: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kept file that cannot be used gives a warning of one line, and is replaced."""
    model = make_model()
    expected = engine(model).logits(PLAN)
    (file,) = kept(folder)
    whole = file.read_bytes()
    match damage:
        case "empty":
            file.write_bytes(b"")
        case "short":
            file.write_bytes(whole[:-100])
        case "index":
            file.write_bytes(whole.replace(b'{"facts"', b'["facts"'))
        case "no facts":
            file.write_bytes(whole.replace(b'"facts"', b'"fakts"'))
        case "no tensors":
            file.write_bytes(whole.replace(b'"tensors"', b'"tenzors"'))
        case "unmappable":
            monkeypatch.setattr(torch, "from_file", cannot_map)
        case _:
            file.write_bytes(whole.replace(b'"digest"', b'"dig_st"'))
    assert torch.equal(engine(model).logits(PLAN), expected)
    assert "cannot be used" in caplog.text
    assert kept(folder)[0].read_bytes() == whole


def test_a_full_disk_costs_the_next_start_only(
    make_model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without room for the file the engine starts, says so, and leaves nothing half-written."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(PreparedWriter, "add", full)
    assert engine(make_model()).logits(PLAN).isfinite().all()
    assert "No space left on device" in caplog.text
    assert sorted(file.name for file in folder.iterdir()) == ["writing.lock"]


def test_a_folder_that_cannot_be_made_costs_the_next_start_only(
    make_model: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If the cache is no folder, a warning says so and the engine starts."""
    folder.parent.write_text("a file")
    assert engine(make_model()).logits(PLAN).isfinite().all()
    assert "cannot be kept" in caplog.text


def test_one_process_writes_at_a_time(make_model: Any, folder: Path) -> None:
    """A worker that starts while another is preparing does not wait, and does not write."""
    folder.mkdir(parents=True)
    with (folder / "writing.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert engine(make_model()).logits(PLAN).isfinite().all()
    assert kept(folder) == []


def test_unused_files_are_removed(make_model: Any, folder: Path) -> None:
    """Leftovers of a killed writer and files that were last used over a month ago are removed; others stay."""
    folder.mkdir(parents=True)
    (folder / "partial-x").write_text("")
    for name, days in (("old", 31), ("recent", 29)):
        (folder / f"{name}.weights").write_text("")
        then = time.time() - days * 24 * 3600
        os.utime(folder / f"{name}.weights", (then, then))
    engine(make_model())
    names = {file.name for file in folder.iterdir()}
    assert {"partial-x", "old.weights"} & names == set()
    assert "recent.weights" in names
