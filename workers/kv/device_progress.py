"""The progress of an engine on a GPU, which reports it by itself when its stream gets there."""

import logging

import torch

from workers.kv.layer_progress import LayerProgress, mark
from workers.kv.pinning import Pinner

_log = logging.getLogger(__name__)


class DeviceProgress(LayerProgress):
    """A report is a copy on the current stream of ``device``, so it shows when the work that was launched before it is
    done. Nothing waits for it.
    """

    def __init__(self, num_layers: int, device: torch.device) -> None:
        """Raises: OSError as LayerProgress."""
        super().__init__(num_layers)
        self._device = device
        self._slot = torch.frombuffer(self.memory.buffer, dtype=torch.int64)

    def report(self, step_id: int, num_layers: int) -> None:
        number = torch.full((1,), mark(step_id, num_layers), dtype=torch.int64, device=self._device)
        self._slot.copy_(number, non_blocking=True)

    def pin(self, pinner: Pinner) -> bool:
        """Keep the memory in place, as copies that nothing waits for require. False if the driver does not pin it."""
        why = pinner.pin(self._slot.data_ptr(), self._slot.nbytes)
        if why:
            _log.warning("other workers cannot copy KV while it is computed, because memory cannot be pinned: %s", why)
        return not why
