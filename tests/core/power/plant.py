"""Hosts with devices that do what a governor orders, in steps of virtual time, for tests."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from actorserve.core.effects import Send
from actorserve.core.messages import DevicePower, InstanceRole, Peer, PowerReport, SetPowerCaps
from actorserve.core.power.governor import DeviceId, PowerConfig, PowerGovernor, Use

REPORT_S = 0.25
PROMPT, TOKEN, MIXED = InstanceRole.PROMPT, InstanceRole.TOKEN, InstanceRole.MIXED


def h100(name: str, cap: float = 700.0, least: float = 200.0, most: float = 700.0) -> DevicePower:
    """A device that draws nothing."""
    return DevicePower(name, least, most, most, cap, cap, 0.0, is_throttled=False, can_set=True)


@dataclass
class Plant:
    """A governor and its hosts. ``devices`` are the truth. Orders and reports take ``delay_s()``; None loses them."""

    config: PowerConfig
    devices: dict[DeviceId, DevicePower]
    uses: dict[DeviceId, Use] = field(default_factory=dict)
    delay_s: Callable[[], float | None] = lambda: 0.0
    obeys: Callable[[DeviceId, float], float] = lambda _, watts: watts
    feed_watts: dict[str, float] = field(default_factory=dict)
    now: float = 0.0
    on_change: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.governor = PowerGovernor(self.config)
        self.hosts = sorted({key.host for key in self.devices})
        self.orders: list[tuple[float, DeviceId, float]] = []
        self.changes: list[tuple[float, DeviceId, float, float]] = []
        """Each change of a cap: when, of which device, from and to how many watts."""
        self.down: set[str] = set()
        self._done: dict[str, int] = {}
        self._on_the_way: list[tuple[float, int, str, SetPowerCaps | PowerReport]] = []
        self._number = 0

    def caps(self, host: str | None = None) -> float:
        """The sum of the caps that are in force, of a host or of all."""
        return sum(power.cap_watts or 0.0 for key, power in self.devices.items() if host in (None, key.host))

    def cap(self, name: str) -> float:
        """The cap of the device of this name."""
        return next(power.cap_watts or 0.0 for key, power in self.devices.items() if key.device == name)

    def take_over(self, config: PowerConfig) -> None:
        """Another governor takes this one's place, and knows nothing yet. ``changes`` are those from now on."""
        self.governor = PowerGovernor(config)
        self._done.clear()
        self._on_the_way.clear()
        self.changes.clear()

    def run(self, seconds: float) -> None:
        """Report and decide in periods, until this time has passed."""
        for _ in range(round(seconds / REPORT_S)):
            for host in self.hosts:
                if host not in self.down:
                    mine = tuple(power for key, power in self.devices.items() if key.host == host)
                    self._later(host, PowerReport(self._done.get(host, 0), mine, self.feed_watts.get(host)))
            self._arrive(self.now + REPORT_S / 2)
            self._decide()
            self._arrive(self.now + REPORT_S)
            self.now += REPORT_S

    def _decide(self) -> None:
        self.governor.validate()
        for effect in self.governor.round(self.uses, self.hosts, self.now + REPORT_S / 2):
            assert isinstance(effect, Send)
            assert isinstance(effect.message, SetPowerCaps)
            host = effect.to.name
            for name, watts in zip(effect.message.devices, effect.message.caps_watts, strict=True):
                self.orders.append((self.now, DeviceId(host, name), watts))
            if host not in self.down:
                self._later(host, effect.message)

    def _later(self, host: str, message: SetPowerCaps | PowerReport) -> None:
        delay_s = self.delay_s()
        if delay_s is not None:
            self._number += 1
            heapq.heappush(self._on_the_way, (self.now + delay_s, self._number, host, message))

    def _arrive(self, until: float) -> None:
        while self._on_the_way and self._on_the_way[0][0] <= until:
            _, _, host, message = heapq.heappop(self._on_the_way)
            if isinstance(message, PowerReport):
                self.governor.on_report(host, Peer(host, 1), message, until)
            elif message.sequence > self._done.get(host, 0):
                self._done[host] = message.sequence
                for name, watts in zip(message.devices, message.caps_watts, strict=True):
                    self._set(DeviceId(host, name), watts)

    def _set(self, key: DeviceId, watts: float) -> None:
        power = self.devices.get(key)
        if power is None or not power.can_set:
            return
        set_watts = self.obeys(key, watts)
        if set_watts != power.cap_watts:
            self.changes.append((self.now, key, power.cap_watts or 0.0, set_watts))
            self.devices[key] = replace(power, cap_watts=set_watts, enforced_watts=set_watts)
            self.on_change()


def equal_pools(count: int = 4, *, budget: float | None = None, host: str = "a") -> Plant:
    """A host with as many prompt devices (p0, p1, ...) as token devices (t0, ...), uncapped at first."""
    names = [f"{kind}{index}" for kind in "pt" for index in range(count)]
    devices = {DeviceId(host, name): h100(name) for name in names}
    uses = {DeviceId(host, name): Use(PROMPT if name[0] == "p" else TOKEN) for name in names}
    return Plant(PowerConfig(budget_watts_of={} if budget is None else {host: budget}), devices, uses)
