"""The actuator's core: what a host's power caps are, told by the serving coordinator and by no other process.

It reports what it reads, sets again what a device forgot, and holds the caps while there is no coordinator. If none
comes back for ``alone_after_s``, it shares the host's budget evenly among the devices, because nothing tells it what
they do. A coordinator that has no budget orders nothing: then the devices get the limits that they had before.
"""

from dataclasses import dataclass
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
from actorserve.core.power.caps import Staircase, meet_budgets

REPORT_S: Final = 0.25
_SAME_WATTS: Final = 0.5  # caps that are read back may be rounded
_AGAIN_S: Final = 5.0  # a cap that a device forgot, or does not come down to, is set again after this time
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
        self._split: frozenset[str] = frozenset()  # the devices whose caps share the budget evenly
        self._next_read_s: float | None = None

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        """Take one message (local ones have no sender), and return the effects, in order."""
        if self._alone_since_s is None and self._coordinator is None:
            self._alone_since_s = now
        match message:
            case PeerUp(peer=peer, role=Role.COORDINATOR):
                self._coordinator, self._number = peer, 0
                self._alone_since_s, self._silent_since_s, self._split = None, now, frozenset()
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
        if self._coordinator is not None:
            effects.append(Send(self._coordinator, PowerReport(self._number, read.devices, read.feed_watts)))
            if self._caps and self._silent_since_s is not None and now >= self._silent_since_s + _UNGOVERNED_S:
                self._caps.clear()
                self._budget_watts = None
                return [*effects, PutBackLimits(), *self._read(now)]
        elif self._is_alone(now) and self._budget_watts is not None:
            devices = frozenset([power.device for power in read.devices if power.can_set])
            if devices != self._split:
                self._split = devices
                effects += self._set(_even_caps(read.devices, self._budget_watts), now)
                return [*effects, *self._read(now)]
        forgotten = {
            power.device: self._caps[power.device]
            for power in read.devices
            if power.can_set and self._is_forgotten(power, now)
        }
        self.num_forgotten += len(forgotten)
        return effects + self._set(forgotten, now)

    def _is_forgotten(self, power: DevicePower, now: float) -> bool:
        """Whether the device has a higher cap than the one that was set a while ago. A lower one keeps the budget, and
        the governor may have given the watts to another device.
        """
        wanted = self._caps.get(power.device)
        if wanted is None or power.cap_watts is None or power.cap_watts <= wanted + _SAME_WATTS:
            return False
        return now >= self._set_s[power.device] + _AGAIN_S

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


def _even_caps(devices: tuple[DevicePower, ...], budget_watts: float) -> dict[str, float]:
    """The budget, shared by the same part of each device's way from its full to its least power."""
    ways = [_way(power) for power in devices]
    caps = meet_budgets(ways, {"": budget_watts}, None)
    return {
        power.device: max(power.least_watts, float(int(cap)))
        for power, cap in zip(devices, caps, strict=True)
        if power.can_set
    }


def _way(power: DevicePower) -> Staircase:
    full = min(power.most_watts, max(power.least_watts, power.usual_watts))
    if power.can_set:
        return Staircase("", None, full, power.least_watts, power.least_watts)
    fixed = full if power.cap_watts is None else power.cap_watts
    return Staircase("", None, fixed, fixed, fixed)
