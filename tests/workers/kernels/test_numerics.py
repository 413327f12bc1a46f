"""The number format that a device computes in."""

import logging

import pytest
import torch

from actorserve.errors import SettingsError
from workers.kernels.numerics import numerics

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), "float32"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16"), ((12, 0), "bfloat16")]
)
def test_auto_is_what_a_gpu_computes_fast(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capability: tuple[int, int], expected: str
) -> None:
    """GPUs compute in bfloat16. GPUs without it compute in float32, and a warning says why."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with caplog.at_level(logging.WARNING):
        assert numerics("auto", CUDA).name == expected
    said = [message for message in caplog.messages if "compute capability 7.5, and bfloat16 needs 8.0" in message]
    assert len(said) == len(caplog.messages) == (expected == "float32")


def test_a_gpu_without_bfloat16_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 on a GPU without it is an error of one line that names what works."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(SettingsError, match=r"capability 7\.5, and bfloat16 needs 8\.0; float32 works there"):
        numerics("bfloat16", CUDA)
    assert numerics("float32", CUDA).activations == torch.float32


def test_auto_on_a_cpu_is_int8() -> None:
    """CPUs compute with 8-bit weights by default."""
    assert numerics("auto", torch.device("cpu")).name == "int8"
