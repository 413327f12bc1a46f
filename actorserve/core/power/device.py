"""What the governor knows of a device: its last reading, the order that is not answered, and what it can use."""

from dataclasses import dataclass, field, replace
from typing import Final

from actorserve.core.messages import DevicePower
from actorserve.core.power.caps import SAME_WATTS, cap_watts, full_watts
from actorserve.core.power.ceiling import LONGEST_S, Ceiling, Heat
from actorserve.core.power.slack import Slack

_DISOBEYED_S: Final = 30.0  # a device that does not come down when it is told to is tried again after this time


@dataclass(slots=True)
class Device:
    """A device's last reading, and what was ordered since: ``ordered_watts`` is the last order that is not answered,
    and ``highest_watts`` the highest one. It took ``granted`` as its cap in place of a higher one, and keeps to
    ``enforced`` under a higher cap. One that ``is_missing`` is in no report of the actuator that is up.
    """

    power: DevicePower
    is_missing: bool = False
    ordered_watts: float | None = None
    highest_watts: float = 0.0
    lowered_s: float | None = None
    granted: Ceiling = field(default_factory=Ceiling)
    enforced: Ceiling = field(default_factory=Ceiling)
    heat: Heat = field(default_factory=Heat)
    disobeyed_until_s: float = 0.0
    slack: Slack = field(default_factory=Slack)

    def cap_watts(self) -> float:
        """The cap that was read back, or may be in force."""
        return cap_watts(self.power)

    def bound_watts(self) -> float:
        """What the device may have, with the orders that may be on their way."""
        return max(self.cap_watts(), self.highest_watts)

    def aim_watts(self) -> float:
        """The cap that it has or will soon have."""
        return self.cap_watts() if self.ordered_watts is None else self.ordered_watts

    def is_free(self, now: float) -> bool:
        """Whether its cap can be chosen."""
        power = self.power
        if not power.can_set or power.cap_watts is None or now < self.disobeyed_until_s:
            return False
        return 0.0 < power.least_watts <= power.most_watts

    def order(self, watts: float) -> None:
        """Order a cap within its constraints."""
        self.ordered_watts = min(self.power.most_watts, max(self.power.least_watts, watts))
        self.highest_watts = max(self.highest_watts, self.ordered_watts)

    def forget_order(self) -> None:
        """The order was answered, or the actuator that got it is gone."""
        self.ordered_watts, self.highest_watts = None, 0.0

    def full_watts(self) -> float:
        return full_watts(self.power)

    def is_capped(self) -> bool:
        """Whether it has less than its full power."""
        return self.cap_watts() < self.full_watts() - SAME_WATTS

    def least_watts(self, now: float) -> float:
        """The lowest cap that it can be brought to."""
        return self.power.least_watts if self.is_free(now) else self.bound_watts()

    def reachable_watts(self) -> float:
        """The highest cap that it may be ordered."""
        return min(self.full_watts(), self.granted.watts)

    def usable_watts(self) -> float:
        """The highest cap that makes a difference."""
        return min(self.reachable_watts(), self.enforced.watts, self.heat.ceiling.watts)

    def read(self, power: DevicePower, now: float, *, is_answer: bool) -> None:
        """Compare the order with what was read, after it was carried out if it ``is_answer``, and see what the device
        cannot use.
        """
        self.power, self.is_missing = power, False
        ordered = self.ordered_watts
        if ordered is not None and is_answer:
            self.forget_order()
            # Nothing is known of what a device did whose driver hangs, or that cannot be set any more.
            if power.can_set and self.cap_watts() > ordered + SAME_WATTS:
                self.disobeyed_until_s = now + _DISOBEYED_S
            elif power.can_set and self.cap_watts() < ordered - SAME_WATTS:
                self.granted.lower(self.cap_watts(), now + LONGEST_S, 0.0)
        if power.enforced_watts is not None and power.enforced_watts < self.cap_watts() - SAME_WATTS:
            self.enforced.lower(power.enforced_watts, now + LONGEST_S)
        self.granted.expire(now)
        self.enforced.expire(now)
        self.heat.update(power, now)

    def lose(self) -> None:
        """Nothing tells any more what it does. Its cap stays in force."""
        self.power = replace(self.power, enforced_watts=None, draw_watts=None, is_throttled=False, can_set=False)
