"""The settings of the coordinator's policies that an operator may change while it runs, and the number of workers.

A change lasts until the whole server restarts, because other processes keep it for the next coordinator
(``lasting_orders``). What is to stay belongs into the settings file.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.cluster.operators import Handler, done, refused
from actorserve.core.cluster.scaling import Scaling
from actorserve.core.effects import Effect
from actorserve.core.messages import Answer, Command
from actorserve.core.migration.pairing import Pairing
from actorserve.core.operations.verbs import nearest

_MAX: Final = 1e9
_SHOWN_CHARS: Final = 40  # of a name that a person wrote
_OF_CLUSTER: Final = ("max_waiting_requests",)
_OF_PAIRING: Final = ("source_below", "source_until", "destination_above", "rest_s", "max_moves")
_OF_SCALING: Final = ("scale_out_below", "scale_in_above", "hold_s", "min_workers")


@dataclass(frozen=True, slots=True)
class _Owner:
    """The part that has a config, and how it is given another."""

    get: Callable[[], Any]
    put: Callable[[Any], None]


class LiveSettings:
    """The handlers of ``set`` and ``scale``. ``pairing`` and ``scaling`` are None if they are switched off."""

    def __init__(
        self,
        get: Callable[[], ClusterConfig],
        put: Callable[[ClusterConfig], None],
        pairing: Pairing | None,
        scaling: Scaling | None,
    ) -> None:
        self._scaling = scaling
        self._owners: dict[str, _Owner] = {f"cluster.{name}": _Owner(get, put) for name in _OF_CLUSTER}
        if pairing is not None:
            owner = _Owner(lambda: pairing.config, pairing.set_config)
            self._owners |= {f"migration.{name}": owner for name in _OF_PAIRING}
        if scaling is not None:
            owner = _Owner(lambda: scaling.config, scaling.set_config)
            self._owners |= {f"scaling.{name}": owner for name in _OF_SCALING}

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {"set": self._on_set, "scale": self._on_scale}

    def _on_set(self, command: Command, now: float, effects: list[Effect]) -> Answer:
        setting, text = command.arguments
        owner = self._owners.get(setting)
        if owner is None:
            known = nearest(setting, self._owners) or f"; these can: {self._all()}"
            return refused(command, f"{setting[:_SHOWN_CHARS]} cannot be set while the server runs{known}")
        config, name = owner.get(), setting.partition(".")[2]
        old = getattr(config, name)
        value = _number_like(old, text)
        if value is None:
            wanted = "a whole number from 1" if isinstance(old, int) else "a number"
            return refused(command, f"{setting} is {text}: expected {wanted}")
        try:
            changed = replace(config, **{name: value})
        except ValueError as error:
            return refused(command, str(error))
        if not command.dry_run:
            owner.put(changed)
        return done(command, f"{setting} is {value:g} until the whole server restarts; it was {old:g}")

    def _all(self) -> str:
        """What can be set, with the section once for its settings, because the text of an answer is short."""
        names: dict[str, list[str]] = {}
        for setting in self._owners:
            section, _, name = setting.partition(".")
            names.setdefault(section, []).append(name)
        return ", ".join(f"{section}.{'/'.join(of_section)}" for section, of_section in names.items())

    def _on_scale(self, command: Command, now: float, effects: list[Effect]) -> Answer:
        (wanted,) = command.arguments
        if self._scaling is None:
            return refused(command, "the number of workers is fixed, because scaling.max_workers is not set")
        target = None if wanted == "auto" else int(wanted)
        config = self._scaling.config
        if target is not None and not config.min_workers <= target <= config.max_workers:
            bounds = f"{config.min_workers} to {config.max_workers}"
            return refused(command, f"{target} workers are out of bounds: scaling allows {bounds}")
        if not command.dry_run:
            self._scaling.target = target
        text = "as many workers run as the load needs" if target is None else f"{target} worker(s) are to run"
        return done(command, text)


def _number_like(old: Any, text: str) -> Any:
    """The number that a person wrote; None if it is none, or not of the kind of the old one.

    Both are ``Any``, because the compiled core turns a whole number that is declared ``float`` into a float.
    """
    try:
        if isinstance(old, int):
            whole = int(text)
            return whole if 1 <= whole <= _MAX else None
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and abs(value) <= _MAX else None
