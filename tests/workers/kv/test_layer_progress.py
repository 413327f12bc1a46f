"""The progress of iterations, layer by layer, as readers see it."""

import pytest
import torch

from workers.kv.device_progress import DeviceProgress
from workers.kv.layer_progress import LayerProgress, SeenProgress, StuckError, mark, wait_until
from workers.kv.pinning import CudaPinner

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class NoPinner:
    """A driver that pins all memory, or none."""

    def __init__(self, why: str) -> None:
        self._why = why

    def pin(self, address: int, num_bytes: int) -> str:
        return self._why

    def unpin(self, address: int) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    "progress", [LayerProgress(3), DeviceProgress(3, torch.device("cpu"))], ids=["of the host", "of a device"]
)
def test_other_processes_see_the_progress(progress: LayerProgress) -> None:
    """It only grows, from one iteration to the next, until iterations are numbered anew."""
    seen = SeenProgress(progress.shown)
    assert seen.value == 0
    progress.of_step(2)(3)
    assert seen.value == progress.value == mark(2, 3) > mark(2, 2) > mark(1, 3)
    progress.end(4)
    assert seen.value == mark(4, 3)
    progress.restart()
    assert seen.value == 0


def test_an_iteration_that_stands_still_is_given_up() -> None:
    """A source that gets no further does not hold a reader for ever."""
    progress = LayerProgress(2)
    progress.report(1, 1)
    with pytest.raises(StuckError, match=r"no further for 0\.01 s"):
        wait_until(progress, mark(1, 2), lambda: None, patience_s=0.01)


def test_memory_that_the_driver_does_not_pin_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Then the device does not report, and other workers copy KV when its iteration has ended."""
    progress = DeviceProgress(3, torch.device("cpu"))
    assert progress.pin(NoPinner(""))
    assert not progress.pin(NoPinner("out of memory"))
    assert "cannot be pinned: out of memory" in caplog.text


@pytest.mark.gpu
@needs_cuda
def test_a_gpu_reports_when_it_gets_there() -> None:
    """A report shows once the work before it is done, and nothing waits for it."""
    device = torch.device("cuda")
    progress = DeviceProgress(3, device)
    assert progress.pin(CudaPinner(device))
    progress.report(1, 2)
    torch.cuda.synchronize(device)
    assert progress.value == mark(1, 2)
