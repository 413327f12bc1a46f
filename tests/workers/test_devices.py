"""Which GPUs workers may use."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from workers.devices import Device, visible

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


def test_the_list_needs_no_torch() -> None:
    """The module prints JSON on any machine, with or without a driver, and does not load torch."""
    code = (
        "import runpy, sys; runpy.run_module('workers.devices', run_name='__main__'); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), list)
