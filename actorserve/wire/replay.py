"""Replay: gives a new core the inputs of a journal, and compares its effects with the recorded ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from actorserve.core.cluster.state import ClusterState
from actorserve.core.effects import Effect
from actorserve.core.gateway.state import GatewayState
from actorserve.core.instance.state import InstanceState
from actorserve.core.replay import make_core
from actorserve.errors import ProtocolError
from actorserve.wire.journal import Entry, digest, read_records
from actorserve.wire.recipes import parse_recipe


@dataclass(frozen=True, slots=True)
class Replay:
    """``core`` has got ``num_entries`` inputs of ``duration_s``. The effects of ``num_compared`` inputs were compared.

    The effects of the last input may be missing, because the process was killed. ``difference`` is None if all effects
    were equal.
    """

    core: InstanceState | ClusterState | GatewayState
    num_entries: int
    num_compared: int
    duration_s: float
    difference: str | None


def replay(file: BinaryIO, on_input: Callable[[Entry, Sequence[Effect]], None] = lambda entry, effects: None) -> Replay:
    """Replay the journal up to the first input whose effects differ from the recorded ones. ``on_input`` gets each
    input and its effects.

    Raises: ProtocolError if the file is no such log.
    """
    records = read_records(file)
    recipe = next(records, None)
    if not isinstance(recipe, str):
        raise ProtocolError("log does not begin with what its core was made from")
    core = make_core(parse_recipe(recipe))
    num_entries = num_compared = 0
    begin_s = end_s = 0.0
    entry: Entry | None = None
    now_digest = b""
    for record in records:
        if isinstance(record, Entry):
            if entry is not None:
                raise ProtocolError(f"log holds no effects of input {num_entries}, though it goes on")
            entry, end_s = record, record.now
            begin_s = begin_s if num_entries else end_s
            num_entries += 1
            effects = core.handle(entry.message, entry.now, entry.sender)
            now_digest = digest(effects)
            on_input(entry, effects)
        elif entry is None or isinstance(record, str):
            raise ProtocolError("log holds effects of no input")
        else:
            num_compared += 1
            if record != now_digest:
                what = f"input {num_entries}, {type(entry.message).__name__} at {entry.now:.6f} s"
                return Replay(core, num_entries, num_compared, end_s - begin_s, f"{what}: its effects differ")
            entry = None
    return Replay(core, num_entries, num_compared, end_s - begin_s, None)
