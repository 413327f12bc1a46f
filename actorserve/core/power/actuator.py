"""The actuator's core: what a host's power caps are, told by the serving coordinator and by no other process.

It reports what it reads, and sets a cap again where a device has a higher one. It holds the caps while there is no
coordinator. If none comes back for ``alone_after_s``, it shares the host's budget evenly among the devices, but no more
watts than their caps had together (``core.power.even_share``). A coordinator that has no budget orders nothing: then
the devices get the limits that they had before.
"""

from dataclasses import dataclass
from math import inf
from typing import Final

from actorserve.core.effects import Effect, PutBackLimits, ReadPower, Send, SetCaps
from actorserve.core.messages import (
    DevicePower,
    Message,
    Peer,
    PeerDown,
    PeerUp,
    PowerRead,
    PowerReport,
    Role,
    SetPowerCaps,
    Tick,
)
from actorserve.core.power.caps import SAME_WATTS, cap_watts
from actorserve.core.power.even_share import share_evenly

REPORT_S: Final = 0.25
_AGAIN_S: Final = 5.0  # a cap that a device forgot, or does not come down to, is set again after this time
_STUCK_S: Final = 1.0  # a device whose cap is too high for so long does not come down
_UNGOVERNED_S: Final = 5.0  # a coordinator with a budget orders something within this time


@dataclass(frozen=True, slots=True)
class ActuatorConfig:
    """``budget_watts`` is the host's until a coordinator tells another; None: it has none."""

    budget_watts: float | None = None
    alone_after_s: float = 60.0


class ActuatorState:
    """The pure state machine of an actuator."""

    def __init__(self, config: ActuatorConfig) -> None:
        self.num_forgotten = 0  # how often a device had a higher cap than the one that was set
        self.num_refused = 0  # messages that were not the serving coordinator's, or were old
        self._config = config
        self._budget_watts = config.budget_watts
        self._coordinator: Peer | None = None
        self._number = 0  # of the last SetPowerCaps
        self._caps: dict[str, float] = {}
        self._set_s: dict[str, float] = {}  # when each cap was last set
        self._alone_since_s: float | None = None
        self._silent_since_s: float | None = None  # since when a coordinator has been up that has ordered nothing
        self._shared_watts: float | None = None  # what the devices share while there is no coordinator
        self._high_since_s: dict[str, float] = {}  # since when a device has had a higher cap than the one that was set
        self._next_read_s: float | None = None

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        """Take one message (local ones have no sender), and return the effects, in order."""
        if self._alone_since_s is None and self._coordinator is None:
            self._alone_since_s = now
        match message:
            case PeerUp(peer=peer, role=Role.COORDINATOR):
                self._coordinator, self._number = peer, 0
                self._alone_since_s, self._silent_since_s, self._shared_watts = None, now, None
                return self._read(now)
            case PeerDown(peer=peer) if peer == self._coordinator:
                self._coordinator, self._alone_since_s = None, now
            case SetPowerCaps() if sender is not None and sender == self._coordinator:
                return self._on_caps(message, now)
            case PowerRead():
                return self._on_read(message, now)
            case Tick() if self._next_read_s is None or now >= self._next_read_s:
                return self._read(now)
            case SetPowerCaps():
                self.num_refused += 1
            case _:
                pass
        return []

    def next_deadline(self) -> float | None:
        """When to send the next Tick, in seconds on the shell's clock."""
        return float("-inf") if self._next_read_s is None else self._next_read_s

    def _read(self, now: float) -> list[Effect]:
        self._next_read_s = now + REPORT_S
        return [ReadPower()]

    def _on_caps(self, message: SetPowerCaps, now: float) -> list[Effect]:
        if message.sequence <= self._number:
            self.num_refused += 1
            return []
        self._number, self._budget_watts, self._silent_since_s = message.sequence, message.budget_watts, None
        wanted = dict(zip(message.devices, message.caps_watts, strict=True))
        return [*self._set(wanted, now), *self._read(now)]

    def _on_read(self, read: PowerRead, now: float) -> list[Effect]:
        """Report it. Then set what devices forgot, share the budget if there has been no coordinator for long, or lift
        the caps if the coordinator has no budget.
        """
        effects: list[Effect] = []
        self._watch(read.devices, now)
        if self._coordinator is not None:
            effects.append(Send(self._coordinator, PowerReport(self._number, read.devices, read.feed_watts)))
            if self._caps and self._silent_since_s is not None and now >= self._silent_since_s + _UNGOVERNED_S:
                self._caps.clear()
                self._budget_watts = None
                return [*effects, PutBackLimits(), *self._read(now)]
        elif self._is_alone(now) and self._budget_watts is not None and read.devices:
            caps = self._share(read.devices, self._budget_watts, now)
            if caps:
                return [*self._set(caps, now), *self._read(now)]
        forgotten = {
            power.device: self._caps[power.device]
            for power in read.devices
            if power.can_set and power.device in self._high_since_s and now >= self._set_s[power.device] + _AGAIN_S
        }
        self.num_forgotten += len(forgotten)
        return effects + self._set(forgotten, now)

    def _watch(self, devices: tuple[DevicePower, ...], now: float) -> None:
        """See which devices have a higher cap than the one that was set. A lower one keeps the budget, and the governor
        may have given the watts to another device.
        """
        self._high_since_s = {
            power.device: self._high_since_s.get(power.device, now)
            for power in devices
            if power.cap_watts is not None and power.cap_watts > self._caps.get(power.device, inf) + SAME_WATTS
        }

    def _share(self, devices: tuple[DevicePower, ...], budget_watts: float, now: float) -> dict[str, float]:
        """The caps to set because there is no coordinator. All devices together get no more than a coordinator left
        them, because other hosts may have the rest of the cluster's budget.
        """
        if self._shared_watts is None:
            left = sum(map(cap_watts, devices)) if self._caps else budget_watts
            self._shared_watts = min(budget_watts, left)
        stuck = {device for device, since_s in self._high_since_s.items() if now >= since_s + _STUCK_S}
        return share_evenly(devices, self._caps, stuck, self._shared_watts)

    def _is_alone(self, now: float) -> bool:
        return self._alone_since_s is not None and now >= self._alone_since_s + self._config.alone_after_s

    def _set(self, caps: dict[str, float], now: float) -> list[Effect]:
        """Set these caps, the ones that become lower first."""
        if not caps:
            return []
        rises = {device: watts - self._caps.get(device, watts) for device, watts in caps.items()}
        order = sorted(caps, key=lambda device: (rises[device], device))
        self._caps.update(caps)
        self._set_s.update(dict.fromkeys(caps, now))
        return [SetCaps(tuple(order), tuple([caps[device] for device in order]))]
