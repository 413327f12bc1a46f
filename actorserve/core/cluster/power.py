"""Power at the coordinator: what devices are used for, the governor's rounds, and the operators' verbs about it."""

import math
from collections.abc import Mapping
from typing import Final

from actorserve.core.cluster.operators import Handler, done, refused
from actorserve.core.cluster.tables import host_of
from actorserve.core.effects import Effect
from actorserve.core.messages import Answer, Column, Command, DevicePower, InstanceRole, Peer, PowerReport
from actorserve.core.operations.event_log import EventLog
from actorserve.core.operations.tables import number_column, text_column
from actorserve.core.placement.fleet import Fleet
from actorserve.core.power.caps import SAME_WATTS, full_watts
from actorserve.core.power.governor import DeviceId, PowerConfig, PowerGovernor, Use

_ALL: Final = "cluster"
_NONE: Final = "none"
_MAX_WATTS: Final = 1e9


class ClusterPower:
    """The governor with its surroundings. ``events`` get what operators should know."""

    def __init__(self, config: PowerConfig, fleet: Fleet, events: EventLog) -> None:
        self.governor = PowerGovernor(config)
        self._fleet = fleet
        self._events = events
        self._actuators: dict[Peer, None] = {}

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {"budget": self._on_budget, "cap": self._on_cap}

    @property
    def next_s(self) -> float | None:
        """When the next round is due; None without actuators."""
        return self.governor.next_s

    def on_up(self, peer: Peer) -> None:
        """An actuator is up."""
        self._actuators[peer] = None

    def on_report(self, peer: Peer, report: PowerReport, now: float) -> bool:
        """An actuator has read its devices. False if it is not known."""
        if peer not in self._actuators:
            return False
        self.governor.on_report(host_of(peer.name), peer, report, now)
        return True

    def on_down(self, peer: Peer) -> None:
        if peer in self._actuators:
            del self._actuators[peer]
            self.governor.on_down(host_of(peer.name), peer)

    def on_tick(self, now: float) -> list[Effect]:
        """The orders of a round, if one is due."""
        if self.governor.next_s is None or now < self.governor.next_s:
            return []
        hosts = {host_of(peer.name) for peer in self._fleet.instances}
        effects = self.governor.round(self._uses(), hosts, now)
        for host, text in self.governor.notices:
            self._events.add(now, "power", host, text)
        self.governor.notices.clear()
        return effects

    def status(self) -> list[tuple[str, object]]:
        """Lines for the verb ``status``."""
        caps = self.governor.caps()
        if not self._actuators:
            return [("power", "no actuator runs, so nothing is capped")]
        draw = _total([power.draw_watts for power in caps.values()])
        limits = _total([power.cap_watts for power in caps.values()])
        budget = self.governor.budget_watts
        return [
            ("power", f"{len(caps)} device(s) together: draw {draw}, power limits {limits}"),
            ("power budget", "none" if budget is None else f"{budget:.0f} W"),
        ]

    def _uses(self) -> dict[DeviceId, Use]:
        """What the instances do on their devices."""
        uses: dict[DeviceId, Use] = {}
        for view in self._fleet.views.values():
            reading = view.report.power
            if reading is None or not reading.device:
                continue
            key = DeviceId(host_of(view.peer.name), reading.device)
            uses[key] = _together(uses.get(key), Use(view.pool, view.report.decode_s or None))
        return uses

    # --- verbs -------------------------------------------------------------------------------------------------------

    def _on_budget(self, command: Command, now: float, effects: list[Effect]) -> Answer:
        watts_text, *target = command.arguments
        host = target[0] if target else _ALL
        known = [_ALL, *sorted({host_of(peer.name) for peer in [*self._actuators, *self._fleet.instances]})]
        if host not in known:
            return refused(command, f"there is no host {host}: expected {', '.join(known)}")
        watts = None
        if watts_text != _NONE:
            watts = _number(watts_text)
            if watts is None:
                return refused(command, f"the budget is {watts_text}: expected watts, or {_NONE}")
        if not command.dry_run:
            self.governor.set_budget(None if host == _ALL else host, watts)
            if self.governor.next_s is not None:
                self.governor.next_s = now  # at once
        text = "no budget" if watts is None else f"a budget of {watts:.0f} W"
        lacks = "" if self._actuators else "; no actuator runs, so nothing is capped"
        return done(command, f"{host} has {text} until the whole server restarts{lacks}")

    def _on_cap(self, command: Command, now: float, effects: list[Effect]) -> Answer:
        if not self._actuators:
            return refused(command, "no actuator runs: start `actorserve power` as root on the hosts")
        return done(command, columns=self._table())

    def _table(self) -> tuple[Column, ...]:
        """A row for each device."""
        caps, uses = self.governor.caps(), self._uses()
        keys, powers = list(caps), list(caps.values())
        roles = [uses[key].role.value if key in uses else "unused" for key in keys]
        budgets = [self.governor.budget_watts_of.get(key.host) for key in keys]
        return (
            text_column("host", [key.host for key in keys]),
            text_column("device", [key.device for key in keys]),
            text_column("role", roles),
            number_column("draw_watts", [power.draw_watts for power in powers]),
            number_column("cap_watts", [power.cap_watts for power in powers]),
            number_column("least_watts", [power.least_watts for power in powers]),
            number_column("full_watts", [full_watts(power) for power in powers]),
            number_column("host_budget_watts", budgets),
            text_column("state", [_state(power) for power in powers]),
        )


def _state(power: DevicePower) -> str:
    """A device's state in a word or a few."""
    if power.is_throttled:
        return "throttled"
    if not power.can_set:
        return "cannot be set"
    if power.cap_watts is None:
        return "unknown"
    return "capped" if power.cap_watts < full_watts(power) - SAME_WATTS else "uncapped"


def _total(watts: list[float | None]) -> str:
    known = [part for part in watts if part is not None]
    return f"{math.fsum(known):.0f} W" if len(known) == len(watts) else "unknown"


def _together(one: Use | None, other: Use) -> Use:
    """Two instances share a device: with different roles it is mixed, and the slower tokens decide."""
    if one is None:
        return other
    role = one.role if one.role is other.role else InstanceRole.MIXED
    return Use(role, max(one.tpot_s or 0.0, other.tpot_s or 0.0) or None)


def _number(text: str) -> float | None:
    """Watts that a person wrote; None if they are none."""
    try:
        watts = float(text)
    except ValueError:
        return None
    return watts if 0.0 < watts <= _MAX_WATTS else None
