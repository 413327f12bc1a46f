"""Random messages with right types: as odd as the codec's schema lets them be, read from their annotations."""

import random
import types
import typing
from dataclasses import is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Final, get_args, get_origin, get_type_hints

import msgpack

from actorserve.core.messages import Message
from actorserve.errors import ProtocolError
from actorserve.wire.codec import WIRE_TAGS, decode, encode

_INTEGERS: Final = (0, 1, 2, 3, 15, 16, 255, 65_536, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1)
_FLOATS: Final = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, 5e-324, 1.7e308)
_TEXTS: Final = (
    "",
    "a",
    "worker-0",
    "gateway-0",
    "coordinator",
    "é\u0000\n\x1b[31m",
    "../../etc",
    "ipc:///x",
    "tcp://127.0.0.1:1",
    "x" * 250,
)
_MAX_ITEMS: Final = 4
_TRIES: Final = 30
_TAG_OF: Final = {cls: tag for tag, cls in WIRE_TAGS.items()}


def random_message(cls: type[Message], dice: random.Random) -> Message:
    """A message that the codec reads. Columns that must have equal lengths often have none, so there are some tries."""
    for _ in range(_TRIES):
        values = _record(cls, dice)
        try:
            return decode(msgpack.packb([_TAG_OF[cls], *values]))
        except (ProtocolError, OverflowError):
            continue
    return decode(msgpack.packb([3]))  # a Heartbeat


def random_frame(dice: random.Random, classes: tuple[type[Message], ...] = tuple(WIRE_TAGS.values())) -> bytes:
    return encode(random_message(dice.choice(classes), dice))


def twisted(frame: bytes, dice: random.Random) -> bytes:
    """``frame`` with one value replaced by another, at any depth; still msgpack."""
    values = msgpack.unpackb(frame)
    _twist(values, dice)
    twisted_frame: bytes = msgpack.packb(values)
    return twisted_frame


def _twist(values: list[Any], dice: random.Random) -> None:
    at = dice.randrange(len(values))
    if isinstance(values[at], list) and values[at] and dice.random() < 0.7:
        _twist(values[at], dice)
        return
    match dice.randrange(5):
        case 0:
            del values[at]
        case 1:
            values.insert(at, dice.choice((None, 7, "x", [])))
        case 2:
            values[at] = [values[at]] * dice.choice((0, 1, 300))
        case _:
            odd: tuple[Any, ...] = (
                None,
                True,
                -1,
                2**64 - 1,
                float("nan"),
                float("inf"),
                -(2**63),
                "",
                "\ud7ff",
                "x" * 5000,
                [],
                [[]],
                b"b",
            )
            values[at] = dice.choice((*odd, {}, {"a": 1}))


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _record(cls: type, dice: random.Random) -> list[Any]:
    length = dice.randint(0, _MAX_ITEMS)
    return [_value(hint, dice, length) for hint in _hints(cls).values()]


def _value(hint: Any, dice: random.Random, length: int) -> Any:
    """As msgpack gives it. ``length``: of columns, so that a record's columns fit together."""
    if hint is str:
        return dice.choice(_TEXTS)
    if hint is bool:
        return dice.random() < 0.5
    if hint is int:
        return dice.choice(_INTEGERS) if dice.random() < 0.7 else dice.getrandbits(dice.randint(1, 62))
    if hint is float:
        return dice.choice(_FLOATS)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple and arguments[-1] is Ellipsis:
        return [_value(arguments[0], dice, length) for _ in range(length if dice.random() < 0.8 else 0)]
    if origin is tuple:
        return [_value(one, dice, length) for one in arguments]
    if origin in (types.UnionType, typing.Union):
        inner = next(one for one in arguments if one is not type(None))
        return None if dice.random() < 0.4 else _value(inner, dice, length)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return dice.choice([one.value for one in hint])
    if isinstance(hint, type) and (is_dataclass(hint) or issubclass(hint, tuple)):
        return _record(hint, dice)
    raise TypeError(f"no values are known for {hint!r}")
