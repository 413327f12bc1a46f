"""What a GPU is asked first: every measurement runs on a CPU, and the command says what a machine lacks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from actorserve.model_files.describe import describe
from actorserve.model_files.description import ModelDescription
from tests.tools.benchmarks.run_bench import ROOT, run_bench
from tools.benchmarks.__main__ import make_parser
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.gpu import checks, first_hour
from tools.benchmarks.gpu.bits import PRODUCTS_TITLE, measure_bits
from tools.benchmarks.gpu.costs import decode_bytes, prefill_flops
from tools.benchmarks.gpu.device import Device
from tools.benchmarks.gpu.first_hour import Step
from tools.benchmarks.gpu.gaps import covered
from tools.benchmarks.gpu.iterations import Measured, Sizes
from tools.benchmarks.gpu.shapes import write_shape
from tools.figures.files import read_figures
from workers.devices import Device as NvmlDevice, DriverError
from workers.kernels.numerics import numerics
from workers.kernels.tiles import AnyRows

SMALL = (
    *("--device", "cpu", "--dtype", "float32", "--threads", "1", "--batches", "1,3", "--contexts", "16,64,100000"),
    *("--prompts", "24", "--batch", "2", "--matrix", "32", "--copy-mib", "1", "--kv-mib", "1", "--rounds", "2"),
)
BFLOAT16 = numerics("bfloat16", torch.device("cpu"))

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize("shape", ["tiny", "tiny-experts"])
def test_a_cpu_runs_every_measurement(shape: str, tmp_path: Path) -> None:
    """With a tiny model all tables have figures, and the file names no GPU."""
    file = tmp_path / "gpu.json"
    done = run_bench("gpu", "--shape", shape, *SMALL, "--json", str(file))
    assert done.returncode == 0, done.stderr
    figures = read_figures(file)
    assert figures.machine.gpu is None
    assert figures.details == {"shape": shape, "dtype": "float32", "device": "cpu"}
    tables = {table.title: table for table in figures.tables}
    assert {title: len(table.rows) for title, table in tables.items()} == {
        "The device's own speed in the same run": 2,
        "Time of a decode step, and its share of the roofline": 4,  # not with more context than the model has
        "Time of a prefill, and its share of the matrix rate": 1,
        "How long the device idles in a decode step": 2,
        "Swapping KV, compared with one plain copy of as many bytes": 2,
        "Decode steps while KV is swapped": 1,
        "The price of equal bits: decode steps with row tiles and without": 1,
    }
    for title, table in tables.items():
        for row in table.rows:
            values = [cell.median for cell in row.cells if cell is not None]
            assert len(values) == len(row.cells), title
            assert all(value >= 0 for value in values), title


def test_a_kernel_of_our_own_is_compared_with_torchs(tmp_path: Path) -> None:
    """Without row tiles the price is that of the products: of each layer of a step, and of all of them together."""
    sizes = Sizes(max_requests=3, max_tokens=32, kv_bytes=2**20, host_kv_bytes=2**20)
    measured = Measured("tiny", tmp_path, Device("cpu"), "float32", 1, sizes)
    measured.engine.layer_tiles = measured.engine.head_tiles = AnyRows()
    table = measure_bits(measured, 3, 16, 2)
    assert table.title == PRODUCTS_TITLE
    assert table.rows[-1].name == "all of a step"
    assert sum(int(row.name.split()[0]) for row in table.rows[:-1]) == 2 * 4 + 1  # of two layers, and the logits
    assert all(cell is not None and cell.median > 0 for row in table.rows for cell in row.cells)


def test_other_engines_serve_the_same_requests(tmp_path: Path) -> None:
    """Our server and transformers' continuous batching give as many tokens, and the table has the ratio of their rates.
    An engine that cannot run is left out with its reason.
    """
    file = tmp_path / "batching.json"
    sizes = ("--requests", "2", "--prompt-tokens", "6", "--output-tokens", "4", "--rounds", "1", "--threads", "1")
    options = ("--shape", "tiny", "--device", "cpu", "--vllm-python", sys.executable)
    done = run_bench("batching", *options, *sizes, "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "without vLLM: vllm: ValueError: vLLM is measured on a GPU" in done.stdout
    (table,) = read_figures(file).tables
    ours, theirs = table.rows
    assert (ours.name, theirs.name) == ("actorserve", "transformers, continuous batching")
    assert ours.cells[0] is not None
    assert theirs.cells[0] is not None
    assert theirs.cells[1] is not None
    assert theirs.cells[1].median == pytest.approx(ours.cells[0].median / theirs.cells[0].median)


@without_gpu
@pytest.mark.parametrize("module", ["tools.benchmarks.gpu.first_hour", "tools.benchmarks"])
def test_a_machine_without_a_gpu_is_told_so(module: str) -> None:
    """Without a GPU the commands end at once with one line and status 2."""
    command = [sys.executable, "-P", "-m", module, *(["gpu"] if module == "tools.benchmarks" else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "finds no" in line


@pytest.mark.parametrize(
    ("lacks", "wanted"),
    [
        ("driver", "the NVIDIA driver answers: broken"),
        ("cuda", "torch finds no GPU: "),
        ("device", "the NVIDIA driver shows no GPU"),
        ("triton", "triton is missing"),
        ("compiler", "apt install gcc"),
        ("headers", "apt install python3-dev"),
        ("nothing", None),
    ],
)
def test_what_a_machine_lacks_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lacks: str, wanted: str | None
) -> None:
    """The first thing that is missing is said, with what to do."""

    def devices() -> list[NvmlDevice]:
        if lacks == "driver":
            raise DriverError("the NVIDIA driver answers: broken")
        return [] if lacks == "device" else [NvmlDevice("GPU-a", "A100", 80)]

    (tmp_path / "Python.h").touch()
    headers = tmp_path / "none" if lacks == "headers" else tmp_path
    monkeypatch.setattr(checks, "usable_devices", devices)
    monkeypatch.setattr("torch.cuda.is_available", lambda: lacks != "cuda")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None if lacks == "triton" else object())
    monkeypatch.setattr("shutil.which", lambda _: None if lacks == "compiler" else "/usr/bin/gcc")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(headers))
    found = checks.missing()
    assert found == wanted or (found is not None and wanted is not None and wanted in found)
    assert found is None or "\n" not in found


def test_the_first_hour_measures_with_commands_that_exist(tmp_path: Path) -> None:
    """tools/bench takes the arguments of every measurement, and each has a figure file of its own."""
    files = set()
    commands = first_hour.commands(("llama-3-8b", "qwen3-30b-a3b"), tmp_path, tmp_path / "python")
    for command in commands.values():
        files.add(make_parser(command[0]).parse_args(command).json)
    assert len(files) == len(commands) == 5


def test_a_step_that_fails_does_not_keep_others_from_running(capsys: pytest.CaptureFixture[str]) -> None:
    """All steps are taken in order, and each failure is one line."""
    taken = []

    def fail() -> None:
        taken.append("a")
        raise BenchError("no reason")

    assert first_hour.take([Step("a", fail), Step("b", lambda: taken.append("b"))]) == ["a: no reason"]
    assert taken == ["a", "b"]
    assert "failed: no reason" in capsys.readouterr().err


@pytest.mark.model
def test_the_default_model_is_asked_a_question(capsys: pytest.CaptureFixture[str]) -> None:
    """The chat of the first hour starts a server and prints its answer."""
    first_hour.chat("cpu")
    assert "Paris" in capsys.readouterr().err


def _described(shape: str, folder: Path) -> ModelDescription:
    return describe(write_shape(shape, folder), "dummy")


def test_a_decode_reads_weights_and_kv(tmp_path: Path) -> None:
    """Llama-3-8B has 7.5 billion weights beside its token table, and 128 KiB of KV a token."""
    llama = _described("llama-3-8b", tmp_path)
    weights = decode_bytes(llama, BFLOAT16, 1, 0)
    assert weights == pytest.approx(2 * 7.505e9, rel=1e-3)
    assert decode_bytes(llama, BFLOAT16, 64, 1024) == weights + 64 * 1024 * 2**17


def test_a_decode_reads_the_experts_that_are_chosen(tmp_path: Path) -> None:
    """One token of Qwen3-30B-A3B reads 8 of 128 experts. Many tokens read nearly all of them."""
    qwen = _described("qwen3-30b-a3b", tmp_path)
    assert decode_bytes(qwen, BFLOAT16, 1, 0) == pytest.approx(2 * 3.04e9, rel=1e-2)
    assert decode_bytes(qwen, BFLOAT16, 256, 0) == pytest.approx(2 * 30.2e9, rel=1e-2)


def test_a_prefill_multiplies_each_token_with_the_weights(tmp_path: Path) -> None:
    """A token of Llama-3-8B takes two operations a weight of its layers, and attention grows with the square."""
    llama = _described("llama-3-8b", tmp_path)
    layers, head = 6.98e9, 128256 * 4096
    assert prefill_flops(llama, 1) == pytest.approx(2 * (layers + head), rel=1e-3)
    attention = 4 * 32 * 4096 * 8192**2 / 2
    assert prefill_flops(llama, 8192) == pytest.approx(2 * (8192 * layers + head) + attention, rel=1e-3)
    qwen = _described("qwen3-30b-a3b", tmp_path)
    assert prefill_flops(qwen, 1) == pytest.approx(2 * 3.04e9, rel=1e-2)


def test_overlapping_kernels_count_once() -> None:
    """Busy time is the union of the kernels' times."""
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6)]) == 4.0
    assert covered([]) == 0.0


def test_shapes_are_models_that_can_be_served(tmp_path: Path) -> None:
    """Each shape's folder has only a config.json, with the context that its measurements need."""
    for shape in ("llama-3-8b", "qwen3-30b-a3b"):
        folder = write_shape(shape, tmp_path)
        assert [file.name for file in folder.iterdir()] == ["config.json"]
        assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] > 32768
