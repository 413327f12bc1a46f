"""The real governor and the real actuator's core around fake GPUs, in virtual time."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Final

from actorserve.core.effects import Effect, ReadPower, Send, SetCaps
from actorserve.core.messages import Message, Peer, PeerUp, PowerReport, Role, SetPowerCaps, Tick
from actorserve.core.power.actuator import ActuatorConfig, ActuatorState
from actorserve.core.power.governor import DeviceId, PowerConfig, PowerGovernor, Use
from tools.benchmarks.power.fake_gpus import STEP_S, FakeHost

HOST: Final = "a"
_ACTUATOR, _COORDINATOR = Peer("a/power", 1), Peer("coordinator", 1)
_MESSAGE_S: Final = (0.0005, 0.005)  # how long a message takes, drawn evenly
_SET_S: Final = 0.02  # how long the driver takes to set the caps of a host, or to read them; assumed


@dataclass
class Excess:
    """How long and how far the host's power was over its budget. ``longest_s`` is of one stretch."""

    longest_s: float = 0.0
    most_watts: float = 0.0
    _since_s: float = 0.0

    def add(self, over_watts: float) -> None:
        """One step with so many watts over the budget."""
        self._since_s = self._since_s + STEP_S if over_watts > 0.0 else 0.0
        self.longest_s = max(self.longest_s, self._since_s)
        self.most_watts = max(self.most_watts, over_watts)


class Loop:
    """A host, its actuator, and the governor that an operator gave a budget."""

    def __init__(self, host: FakeHost, config: PowerConfig, rng: random.Random) -> None:
        self.host = host
        self.governor = PowerGovernor(config)
        self.now = 0.0
        self.excess = Excess()
        self._actuator = ActuatorState(ActuatorConfig())
        self._rng = rng
        self._numbers = count()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._tell_actuator(PeerUp(_COORDINATOR, Role.COORDINATOR))

    @property
    def budget_watts(self) -> float:
        return self.governor.budget_watts_of.get(HOST, float("inf"))

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> float:
        """Let time pass, at most until something holds. Returns how many seconds passed."""
        began_s = self.now
        while self.now < began_s + seconds and not until():
            self.now += STEP_S
            self.host.step()
            while self._later and self._later[0][0] <= self.now:
                heapq.heappop(self._later)[2]()
            deadline = self._actuator.next_deadline()
            if deadline is not None and deadline <= self.now:
                self._tell_actuator(Tick())
            if self.governor.next_s is not None and self.governor.next_s <= self.now:
                uses = {DeviceId(HOST, gpu.name): Use(gpu.role) for gpu in self.host.gpus}
                for effect in self.governor.round(uses, [HOST], self.now):
                    self._carry(effect)
            self.excess.add(self.host.watts - self.budget_watts)
        return self.now - began_s

    def _tell_actuator(self, message: Message, sender: Peer | None = None) -> None:
        for effect in self._actuator.handle(message, self.now, sender):
            self._carry(effect)

    def _carry(self, effect: Effect) -> None:
        """Perform an effect of one of the two cores, after the time that it takes."""
        match effect:
            case Send(message=PowerReport() as report):
                self._in(self._message_s(), lambda: self.governor.on_report(HOST, _ACTUATOR, report, self.now))
            case Send(message=SetPowerCaps() as order):
                self._in(self._message_s(), lambda: self._tell_actuator(order, _COORDINATOR))
            case SetCaps(devices=devices, caps_watts=caps_watts):
                self._in(_SET_S, lambda: self.host.set_caps(devices, caps_watts))
            case ReadPower():
                self._in(_SET_S, lambda: self._tell_actuator(self.host.read()))
            case _:
                raise TypeError(f"a core wants {effect}")

    def _message_s(self) -> float:
        return self._rng.uniform(*_MESSAGE_S)

    def _in(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._later, (self.now + seconds, next(self._numbers), act))
