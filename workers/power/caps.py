"""Sets power caps on the GPUs, and puts their former limits back."""

import logging
from typing import Final

from actorserve.core.messages import PowerRead
from workers.power.feed import FeedMeter
from workers.power.former_limits import FormerLimits
from workers.power.nvml import Gpus

_log: Final = logging.getLogger("actorserve.power")


class PowerCaps:
    """The devices of this host as the actuator sees them. ``gpus``: None if no driver answers.

    What an actuator that was killed left behind is put back at once.
    """

    def __init__(self, gpus: Gpus | None, former: FormerLimits, feed: FeedMeter | None = None) -> None:
        self._gpus = gpus
        self._former = former
        self._feed = feed or FeedMeter()
        if former.watts:
            _log.warning("an earlier actuator ended without putting back %d power limit(s)", len(former.watts))
        self.put_back()

    def read(self) -> PowerRead:
        return PowerRead(() if self._gpus is None else self._gpus.read(), self._feed.watts())

    def set_caps(self, devices: tuple[str, ...], caps_watts: tuple[float, ...]) -> None:
        """Set the caps in this order. A device whose former limit is not on disk is not touched.

        Raises: OSError if the former limits cannot be kept.
        """
        if self._gpus is None:
            return
        wanted = dict(zip(devices, caps_watts, strict=True))
        unknown = set(wanted) - set(self._former.watts)
        if unknown:
            limits = {power.device: power.cap_watts for power in self._gpus.read()}
            self._former.keep({device: watts for device in unknown if (watts := limits.get(device)) is not None})
        for device, watts in wanted.items():
            if device in self._former.watts:
                self._gpus.set_cap(device, watts)

    def put_back(self) -> None:
        """Give every device its former limit. One that does not answer gets it when it answers again, at a start."""
        if self._gpus is None:
            return
        for device, watts in list(self._former.watts.items()):
            if self._gpus.set_cap(device, watts):
                self._former.forget(device)
