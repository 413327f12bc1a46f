"""Which GPUs workers may use."""

import json
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from workers.cuda_version import why_no_cuda
from workers.devices import Device, DriverError, driver_cuda_version, driver_devices, visible

ROOT = Path(__file__).resolve().parents[2]
A = Device("GPU-aaaa-1", "H200", 10)
B = Device("GPU-abbb-2", "H200", 10)
C = Device("GPU-cccc-3", "H200", 10)


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, [A, B, C]),
        ("", []),
        ("-1", []),
        ("1", [B]),
        ("2, 0", [C, A]),
        ("0,7,1", [A]),
        ("0,0,1", [A]),
        ("GPU-c", [C]),
        ("GPU-a", []),
        ("GPU-aaaa-1,GPU-abbb-2", [A, B]),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(variable: str | None, expected: list[Device]) -> None:
    """Indices and beginnings of UUIDs choose GPUs in order; the first entry that names no further GPU ends the list."""
    assert visible([A, B, C], variable) == expected


def test_a_slice_is_chosen_by_its_name() -> None:
    """A MIG slice that the variable names is used unchanged if there is a driver."""
    assert [device.selector for device in visible([A], "MIG-1234")] == ["MIG-1234"]
    assert visible([], "MIG-1234") == []


def fail_with(monkeypatch: pytest.MonkeyPatch, function: str, code: int) -> None:
    """Let a function of NVML fail, on a machine where the library is."""

    def fail(*_: object) -> None:
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, function, fail)


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_a_machine_without_a_driver_has_no_gpu(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Without a driver there are no GPUs, which is no error."""
    fail_with(monkeypatch, "nvmlInit", code)
    assert driver_devices() == []


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount"])
def test_a_driver_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """A driver that is there and fails is told of, because otherwise a machine with GPUs would serve on its CPU."""
    fail_with(monkeypatch, function, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    with pytest.raises(DriverError, match="RM has detected an NVML/RM version mismatch"):
        driver_devices()


def test_the_list_needs_no_torch() -> None:
    """The module prints JSON on any machine, with or without a driver, and does not load torch."""
    code = (
        "import runpy, sys; runpy.run_module('workers.devices', run_name='__main__'); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), list)


@pytest.mark.parametrize(
    ("built_for", "driver", "wanted"),
    [
        (None, None, "this build of torch has no CUDA"),
        ("13.0", None, "no NVIDIA driver that answers"),
        ("13.0", (12, 4), "the driver runs CUDA up to 12.4, and torch is built for CUDA 13.0"),
        ("13.0", (12, 4), "+cu126, as README.md says"),
        ("13.0", (11, 8), "torch is built for CUDA 13.0; update the driver"),
        ("12.8", (13, 0), "CUDA_VISIBLE_DEVICES may hide the GPUs"),
    ],
)
def test_why_torch_finds_no_gpu(
    monkeypatch: pytest.MonkeyPatch, built_for: str | None, driver: tuple[int, int] | None, wanted: str
) -> None:
    """The reason compares the driver with torch's build."""
    monkeypatch.setattr("torch.version.cuda", built_for)
    monkeypatch.setattr("workers.cuda_version.driver_cuda_version", lambda: driver)
    assert wanted in why_no_cuda()


def test_the_drivers_version_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML tells the version of CUDA as one number."""
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlSystemGetCudaDriverVersion_v2", lambda: 12040)
    assert driver_cuda_version() == (12, 4)
