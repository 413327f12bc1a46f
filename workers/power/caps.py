"""Sets power caps on the GPUs, and puts their former limits back."""

import logging
from dataclasses import replace
from typing import Final

from actorserve.core.messages import DevicePower, PowerRead
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
        self._cannot_keep = False  # whether former limits could not be written down
        if former.watts:
            _log.warning("an earlier actuator ended without putting back %d power limit(s)", len(former.watts))
        self.put_back()

    def read(self) -> PowerRead:
        """What all devices tell. A limit that something else has set is the highest one that a device may have, and its
        usual one if it is higher than the driver's.
        """
        devices = () if self._gpus is None else self._gpus.read()
        return PowerRead(tuple(map(self._within_former, devices)), self._feed.watts())

    def set_caps(self, devices: tuple[str, ...], caps_watts: tuple[float, ...]) -> None:
        """Set the caps in this order. A device whose former limit is not on disk is not touched."""
        if self._gpus is None:
            return
        wanted = dict(zip(devices, caps_watts, strict=True))
        unknown = set(wanted) - set(self._former.watts)
        if unknown:
            limits = {power.device: power.cap_watts for power in self._gpus.read()}
            self._keep({device: watts for device in unknown if (watts := limits.get(device)) is not None})
        for device, watts in wanted.items():
            if device in self._former.watts:
                self._gpus.set_cap(device, watts)

    def put_back(self) -> None:
        """Give every device its former limit. One that does not answer gets it when it answers again, at a start."""
        if self._gpus is None:
            return
        done = [device for device, watts in self._former.watts.items() if self._gpus.put_back(device, watts)]
        try:
            self._former.forget(done)
        except OSError as error:
            _log.warning("power limits were put back, which cannot be written down: %s", error)

    def _within_former(self, power: DevicePower) -> DevicePower:
        former = self._former.watts.get(power.device, power.cap_watts)
        if former is None:
            return power
        most = min(power.most_watts, max(power.least_watts, former))
        return replace(power, most_watts=most, usual_watts=max(power.usual_watts, most))

    def _keep(self, limits: dict[str, float]) -> None:
        """Write former limits down. If that fails their devices stay uncapped, and the next order tries it again."""
        try:
            self._former.keep(limits)
        except OSError as error:
            if not self._cannot_keep:
                _log.warning("power limits cannot be written down, so their GPUs are not capped: %s", error)
            self._cannot_keep = True
        else:
            self._cannot_keep = False
