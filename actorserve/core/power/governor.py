"""The governor: it keeps hosts and the cluster within budgets in watts, by the power caps of their devices.

``core.power.caps`` says which caps meet the budgets. The governor takes the devices there, once per ``period_s``:

- **A cap is in force only when it was read back.** Until then the device counts at the higher one of the cap that was
  read last and the cap that was ordered. An order is sent again until the actuator has carried it out.
- **It lowers before it raises.** A cap is raised only by watts that are free by that count, so the sum of the caps
  never passes a budget on the way, once it is below it.
- **Constraints hold.** A cap is within what the device's driver allows. A device that cannot be set, or does not come
  down when it is told to, counts at the cap that it has, and the others make up for it. So does a device whose actuator
  is gone, while its host has workers, and one that the next actuator cannot read, while a worker uses it. A device that
  grants less than it was ordered is not ordered more for some minutes.
- **The feed decides.** If a host draws more than its budget although its caps are in force, the caps are taken so much
  lower. They come back slowly.
- **Heat frees watts.** What a device cannot use goes to others (``core.power.ceiling``).
- **No cap flaps.** Small changes wait until they matter, and a cap that was lowered is not raised for ``hold_s``,
  except after a change of a budget. Tokens that could take longer keep their watts until that has been so for
  ``hold_s``, because a batch that grows again could not get them back at once.
- **A new governor waits.** Caps that it finds are another coordinator's, from which it takes over. It learns what the
  instances do, and which budgets operators have ordered, after it learns of the devices. So for ``_SETTLE_S`` it
  changes no caps of theirs but those that pass a budget. Under the cluster's budget it raises none while workers use
  devices of a host whose actuator has not reported yet, for up to ``_GATHER_S``.
- **Infeasible budgets are said**, once, with the least watts that are feasible, or with what is drawn under the least
  caps. All devices then have least power.
- **Full power comes back.** Without budgets it goes on until it has read its devices at their full power, however long
  a driver hangs. From then on it leaves them alone.

From a reading over the budget to caps read back passes one control period: a report of the actuator, a round here, and
the next report (``CONTROL_PERIOD_S``).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import ceil, floor, inf
from typing import Final, NamedTuple

from actorserve.core.effects import Effect, Send
from actorserve.core.messages import DevicePower, InstanceRole, Peer, PowerReport, SetPowerCaps
from actorserve.core.power.caps import SAME_WATTS, Staircase, meet_budgets
from actorserve.core.power.curves import CURVES, PhaseCurves
from actorserve.core.power.device import Device
from actorserve.core.power.feed import FeedWatch
from actorserve.core.power.slack import PROMPT_SLOWDOWN, Knees

PERIOD_S: Final = 0.25
CONTROL_PERIOD_S: Final = 1.0
"""The longest time in which a host that can meet its budget draws more than that, unless messages are lost."""
_RESEND_S: Final = 0.5
_SETTLE_S: Final = 2.0
_GATHER_S: Final = 10.0
_ROUNDING_WATTS: Final = 1e-6
_DEADBAND_WATTS: Final = 5.0  # smaller changes wait until a budget needs them
_MUCH_WATTS: Final = 1e9
_ORDER: Final = (InstanceRole.PROMPT, InstanceRole.MIXED, InstanceRole.TOKEN, None)  # in which caps are raised


@dataclass(frozen=True, slots=True)
class PowerConfig:
    """``budget_watts`` is the cluster's and ``budget_watts_of`` that of hosts by name; without any, nothing is capped.

    A cap of a token instance may make its tokens take up to ``tpot_target_s``. Where the time of its tokens at full
    power is not known, the cap may not slow them at all. A reading over the budget lowers caps; ``hold_s`` is the time
    before a cap that was lowered is raised.
    """

    budget_watts: float | None = None
    budget_watts_of: Mapping[str, float] = field(default_factory=dict)
    curves: PhaseCurves = CURVES["h100"]
    tpot_target_s: float = 0.1
    hold_s: float = 5.0


class Use(NamedTuple):
    """What an instance does on a device: its role, and the time of a token at full power (None: not known)."""

    role: InstanceRole
    tpot_s: float | None = None


class DeviceId(NamedTuple):
    """A device, by its host and its driver's name for it."""

    host: str
    device: str


@dataclass(slots=True)
class _Host:
    """The host's actuator (None: it is gone), the number of the last order, which was sent at ``sent_s`` (0: none was,
    so the actuator does not know yet that its devices are governed), the number of the last one that it has carried
    out, and the budget that it was told. Caps that were there first stay until ``settled_s``.
    """

    actuator: Peer | None = None
    number: int = 0
    done_number: int = 0
    sent_s: float = 0.0
    told_budget: float | None = None
    feed_watts: float | None = None
    devices: dict[str, Device] = field(default_factory=dict)
    settled_s: float | None = None

    def is_capped(self) -> bool:
        """Whether its actuator must be told more before its devices have their full power. One that was told nothing
        gives them that by itself.
        """
        if self.actuator is None or self.number == 0:
            return False
        is_open = self.done_number < self.number
        return is_open or any(device.is_capped() for device in self.devices.values())


class PowerGovernor:
    """Decides the power caps of all devices whose hosts have an actuator."""

    def __init__(self, config: PowerConfig) -> None:
        self.notices: list[tuple[str, str]] = []
        """What operators should read, as pairs of a host (or ``cluster``) and a text. The owner takes them out."""
        self.budget_watts = config.budget_watts
        self.budget_watts_of: dict[str, float] = dict(config.budget_watts_of)
        self._config = config
        self._knees = Knees(config.curves)
        self._hosts: dict[str, _Host] = {}
        self._feeds: dict[str, FeedWatch] = {}  # by host; the cluster's has an empty name
        self._said: set[tuple[str, float, str]] = set()  # infeasible budgets: the host, the budget, a reason
        self._has_capped = False  # whether caps have to be taken back
        self._began_s: float | None = None  # when the first actuator reported
        self.next_s: float | None = None

    # --- events ------------------------------------------------------------------------------------------------------

    def set_budget(self, host: str | None, watts: float | None) -> None:
        """The budget of a host, or of the cluster (None); no ``watts`` takes it away."""
        if host is None:
            self.budget_watts = watts
        elif watts is None:
            self.budget_watts_of.pop(host, None)
        else:
            self.budget_watts_of[host] = watts
        self._feeds.pop(host or "", None)
        self._said = {said for said in self._said if said[0] != (host or "")}
        for known in self._hosts.values():
            for device in known.devices.values():
                device.lowered_s = None

    def on_report(self, host: str, actuator: Peer, report: PowerReport, now: float) -> None:
        """An actuator has read its host's devices."""
        if self._began_s is None:
            self._began_s = now
        known = self._hosts.setdefault(host, _Host())
        if known.actuator != actuator:
            known.actuator, known.number, known.told_budget = actuator, 0, None
            for device in known.devices.values():
                device.forget_order()
                device.is_missing = True
        known.feed_watts, known.done_number = report.feed_watts, report.sequence
        devices: dict[str, Device] = {}
        for power in report.devices:
            device = known.devices.get(power.device) or Device(power)
            if power.device not in known.devices and known.number:
                # Its cap may be one of ours that was not taken back, because it was away.
                self._has_capped |= device.is_capped()
            if power.cap_watts is not None and power.cap_watts > device.bound_watts() + SAME_WATTS:
                self.next_s = now  # it has forgotten its cap, so a budget may be passed
            device.read(power, now, is_answer=report.sequence >= known.number)
            devices[power.device] = device
        # A device that fell off the bus draws nothing any more. One that a new actuator cannot read may draw as before.
        for name, device in known.devices.items():
            if device.is_missing:
                device.lose()
                devices[name] = device
        known.devices = devices
        if known.settled_s is None:
            has_caps = any(device.is_capped() for device in devices.values())
            known.settled_s = now + _SETTLE_S if has_caps else now
        if self.next_s is None:
            self.next_s = now

    def on_down(self, host: str, actuator: Peer) -> None:
        """The actuator is gone. Its caps stay in force, and nothing tells any more what its devices do."""
        known = self._hosts.get(host)
        if known is not None and known.actuator == actuator:
            known.actuator, known.feed_watts = None, None
            for device in known.devices.values():
                device.lose()

    def round(self, uses: Mapping[DeviceId, Use], hosts: Collection[str], now: float) -> list[Effect]:
        """The orders of this round, by what each device is used for. ``hosts`` have workers. Call it at ``next_s``."""
        for name in [name for name, known in self._hosts.items() if known.actuator is None and name not in hosts]:
            del self._hosts[name]
        for name, known in self._hosts.items():
            known.devices = {
                device: found
                for device, found in known.devices.items()
                if not found.is_missing or DeviceId(name, device) in uses
            }
        self.next_s = now + PERIOD_S if self._hosts else None
        if not self._has_budgets() and not self._has_capped:
            return []
        targets = self._targets(uses, now)
        free = self._free_watts()
        ordered = self._lower(targets, free, now)
        if not self._is_gathering(uses, now):
            ordered |= self._raise(targets, uses, free, now)
        effects = self._orders(ordered, now)
        self._has_capped = self._has_budgets() or any(known.is_capped() for known in self._hosts.values())
        return effects

    def caps(self) -> dict[DeviceId, DevicePower]:
        """The last readings of all devices."""
        return {
            DeviceId(host, name): device.power
            for host, known in sorted(self._hosts.items())
            for name, device in known.devices.items()
        }

    def validate(self) -> None:
        """Raises: AssertionError if an order is outside a device's constraints."""
        for host in self._hosts.values():
            for device in host.devices.values():
                watts = device.ordered_watts
                assert watts is None or device.power.least_watts <= watts <= device.power.most_watts, (
                    f"{device.power.device} was ordered {watts} W, outside of its constraints"
                )

    # --- where the caps should be ------------------------------------------------------------------------------------

    def _targets(self, uses: Mapping[DeviceId, Use], now: float) -> dict[DeviceId, float]:
        """The caps that meet the budgets, of the devices whose caps can be chosen."""
        ids = [DeviceId(host, name) for host, known in sorted(self._hosts.items()) for name in sorted(known.devices)]
        full = [self._staircase(key, uses.get(key), False, now) for key in ids]
        of_host = {
            host: self._trimmed(host, budget, [key for key in ids if key.host == host], now)
            for host, budget in sorted(self.budget_watts_of.items())
            if host in self._hosts
        }
        of_all = None if self.budget_watts is None else self._trimmed("", self.budget_watts, ids, now)
        for host in of_host:
            self._say_infeasible(host, self.budget_watts_of[host], [device for device in full if device.host == host])
        if self.budget_watts is not None:
            self._say_infeasible("", self.budget_watts, full)
        caps = meet_budgets(full, of_host, of_all)
        if any(cap < device.top_watts for cap, device in zip(caps, full, strict=True)):
            # Watts are short, so nothing keeps what it cannot use.
            useful = [self._staircase(key, uses.get(key), True, now) for key in ids]
            caps = meet_budgets(useful, of_host, of_all)
        return {
            key: _whole_watts(cap, self._device(key))
            for key, cap in zip(ids, caps, strict=True)
            if self._device(key).is_free(now)
        }

    def _staircase(self, key: DeviceId, use: Use | None, is_limited: bool, now: float) -> Staircase:
        """``is_limited``: it goes no higher than what the device can use."""
        device = self._device(key)
        if not device.is_free(now):
            fixed = device.bound_watts()
            return Staircase(key.host, None, fixed, fixed, fixed)
        least, full = device.power.least_watts, device.full_watts()
        top = max(least, device.usable_watts()) if is_limited else full
        if use is None:
            return Staircase(key.host, None, top, least, least)
        unit = self._config.curves.full_watts or device.power.usual_watts  # of the curves
        if use.role is InstanceRole.PROMPT:
            knee, *slower = self._knees.fractions(PROMPT_SLOWDOWN, is_prompt=True)
        else:
            slowdown = device.slack.update(use.tpot_s, self._config.tpot_target_s, self._config.hold_s, now)
            knee, *slower = self._knees.fractions(slowdown, is_prompt=False)
        slower_watts = tuple([unit * fraction for fraction in slower])
        return Staircase(key.host, use.role, top, max(least, unit * knee), least, slower_watts)

    def _trimmed(self, host: str, budget: float, ids: list[DeviceId], now: float) -> float:
        """The budget for caps, less what was drawn beyond it although the caps were in force."""
        feed = self._feeds.setdefault(host, FeedWatch())
        devices = [self._device(key) for key in ids]
        bound = sum([device.bound_watts() for device in devices])
        least = sum([device.least_watts(now) for device in devices])
        draw = self._draw(host, ids)
        excess = feed.excess_watts(budget, draw, bound, least + SAME_WATTS * len(devices), now)
        if feed.is_beyond_caps and least <= budget:
            text = f"{draw or 0.0:.0f} W are drawn although its devices have least power, {ceil(least)} W together"
            self._say(host, budget, "feed", text)
        return budget - excess

    def _draw(self, host: str, ids: list[DeviceId]) -> float | None:
        """What the host, or the cluster, draws: as the feed tells, or else as all devices tell together."""
        if host and self._hosts[host].feed_watts is not None:
            return self._hosts[host].feed_watts
        total = 0.0
        for key in ids:
            draw = self._device(key).power.draw_watts
            if draw is None:
                return None
            total += draw
        return total

    def _say_infeasible(self, host: str, budget: float, devices: list[Staircase]) -> None:
        least = ceil(sum([device.least_watts for device in devices]))
        if least > budget:
            self._say(host, budget, f"{least}", f"its devices take at least {least} W")

    def _say(self, host: str, budget: float, reason: str, text: str) -> None:
        """Operators read once for this reason that a budget cannot be met."""
        if (host, budget, reason) not in self._said:
            self._said.add((host, budget, reason))
            self.notices.append((host or "cluster", f"the budget of {budget:.0f} W cannot be met: {text}"))

    # --- how they get there ------------------------------------------------------------------------------------------

    def _lower(self, targets: Mapping[DeviceId, float], free: Mapping[str, float], now: float) -> set[str]:
        """Lower what is too high: at once where a budget is passed, else where it is worth it. Returns the hosts."""
        lowered: set[str] = set()
        for key, target in targets.items():
            device = self._device(key)
            aim = device.aim_watts()
            must_fall = _free_at(free, key.host) < 0.0
            by = SAME_WATTS if must_fall else _DEADBAND_WATTS
            if target <= aim - by and (must_fall or self._is_settled(key.host, now)):
                device.order(target)
                device.lowered_s = now
                lowered.add(key.host)
        return lowered

    def _raise(
        self, targets: Mapping[DeviceId, float], uses: Mapping[DeviceId, Use], free: dict[str, float], now: float
    ) -> set[str]:
        """Raise by free watts, prompt instances first. Returns the hosts. It takes the watts from ``free``."""
        raised: set[str] = set()
        for role in _ORDER:
            for key, target in targets.items():
                use = uses.get(key)
                device = self._device(key)
                if (None if use is None else use.role) is not role or device.ordered_watts is not None:
                    continue
                if not self._is_settled(key.host, now):
                    continue
                if device.lowered_s is not None and now < device.lowered_s + self._config.hold_s:
                    continue
                cap = device.cap_watts()
                wanted = min(target, cap + floor(max(0.0, _free_at(free, key.host))), device.reachable_watts())
                if wanted < device.power.least_watts:
                    continue  # a driver may tell a cap below its own constraints
                least_rise = SAME_WATTS if wanted == device.reachable_watts() else _DEADBAND_WATTS
                if wanted > cap + least_rise:
                    device.order(wanted)
                    for scope in ("", key.host):
                        free[scope] = free.get(scope, inf) - (wanted - cap)
                    raised.add(key.host)
        return raised

    def _free_watts(self) -> dict[str, float]:
        """How many watts of each host's budget, and of the cluster's (an empty name), no cap takes; less than 0 if the
        caps pass it. Hosts without a budget are left out.
        """
        bounds = {
            host: sum([device.bound_watts() for device in known.devices.values()])
            for host, known in self._hosts.items()
        }
        free = {
            host: self.budget_watts_of[host] - self._excess(host) - bound
            for host, bound in bounds.items()
            if host in self.budget_watts_of
        }
        if self.budget_watts is not None:
            free[""] = self.budget_watts - self._excess("") - sum(bounds.values())
        return free

    def _has_budgets(self) -> bool:
        return self.budget_watts is not None or bool(self.budget_watts_of)

    def _excess(self, host: str) -> float:
        feed = self._feeds.get(host)
        return 0.0 if feed is None else feed.taken_watts

    def _orders(self, ordered: set[str], now: float) -> list[Effect]:
        """A message for each host with new orders, with a message that is not answered, or with another budget."""
        effects: list[Effect] = []
        for name, host in sorted(self._hosts.items()):
            is_late = host.number > host.done_number and now >= host.sent_s + _RESEND_S
            has_new = name in ordered or host.number == 0
            budget = self._budget_alone(name)
            if host.actuator is None or not (is_late or has_new or budget != host.told_budget):
                continue
            host.number += 1
            host.sent_s, host.told_budget = now, budget
            waiting = {key: device.ordered_watts for key, device in host.devices.items()}
            caps = {key: watts for key, watts in waiting.items() if watts is not None}
            message = SetPowerCaps(host.number, tuple(caps), tuple(caps.values()), budget)
            effects.append(Send(host.actuator, message))
        return effects

    def _budget_alone(self, host: str) -> float | None:
        """What the host may take while there is no coordinator; None: nothing tells that."""
        own = self.budget_watts_of.get(host)
        if own is None and len(self._hosts) > 1:
            return None
        return min([budget for budget in (own, self.budget_watts) if budget is not None], default=None)

    def _is_settled(self, host: str, now: float) -> bool:
        settled_s = self._hosts[host].settled_s
        return settled_s is not None and now >= settled_s

    def _is_gathering(self, uses: Mapping[DeviceId, Use], now: float) -> bool:
        """Whether devices may count under the cluster's budget that no actuator has reported to us yet."""
        if self.budget_watts is None or self._began_s is None or now >= self._began_s + _GATHER_S:
            return False
        return any(key.host not in self._hosts for key in uses)

    def _device(self, key: DeviceId) -> Device:
        return self._hosts[key.host].devices[key.device]


def _whole_watts(cap: float, device: Device) -> float:
    """Caps are whole watts, except for those that are limits of the device."""
    whole = float(floor(cap + _ROUNDING_WATTS))
    return cap if cap >= device.full_watts() else max(device.power.least_watts, whole)


def _free_at(free: Mapping[str, float], host: str) -> float:
    """How far a cap of this host may rise."""
    return min(free.get("", inf), free.get(host, inf), _MUCH_WATTS)
