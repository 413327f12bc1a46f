"""Broken bytes: from nothing, or from a good frame. The same dice always give the same bytes."""

import random
import struct
from typing import Final

MAX_BYTES: Final = 2**16
_INTERESTING: Final = (
    b"\x00",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\xc0",
    b"\xc1",
    b"\xdd\xff\xff\xff\xff",
    b"\xcf" + b"\xff" * 8,
)
_DEPTH: Final = 3000

BOMBS: Final = (
    b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1 items
    b"\xdf\xff\xff\xff\xff",  # a map
    b"\xdb\xff\xff\xff\xff",  # a string
    b"\xc6\xff\xff\xff\xff",  # bytes
    b"\xc9\xff\xff\xff\xff\x01",  # an extension
    b"\x91" * _DEPTH,  # arrays in arrays
    b"\x81\xa1a" * _DEPTH,  # maps in maps
    b"\xdd\x00\x10\x00\x00" * 8,  # arrays of 2^20 items, in each other
    b"\xdc\xff\xff" + b"\xdc\xff\xff" * 4000,
    b"\x93\x01\x02\xd6\xff\xff\xff\xff\xff",  # a timestamp
    b"\xc7\x0c\xff\xff\xff\xff\xff\x7f" + b"\xff" * 7,  # a timestamp beyond all times
    b"\x9f" + b"\xcb\x7f\xf8" + b"\x00" * 6,  # NaN
    b"\xa4\xff\xfe\xfd\xfc",  # no UTF-8
)
"""msgpack that claims or costs more than it holds."""


def random_bytes(dice: random.Random) -> bytes:
    return dice.randbytes(dice.choice((0, 1, 2, 7, 8, 64, 300, 4000)))


def mutated(frame: bytes, dice: random.Random) -> bytes:
    """``frame`` with one to four changes; it may, by chance, still be good."""
    for _ in range(dice.randint(1, 4)):
        frame = _changed(frame, dice)
    return frame[:MAX_BYTES]


def _changed(frame: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(frame) + 1)
    end = min(len(frame), at + dice.choice((1, 2, 4, 30)))
    match dice.randrange(8):
        case 0:  # cut off
            return frame[:at]
        case 1:  # a bit
            return frame[:at] + bytes(one ^ 1 << dice.randrange(8) for one in frame[at : at + 1]) + frame[at + 1 :]
        case 2:
            return frame[:at] + dice.choice(_INTERESTING) + frame[end:]
        case 3:
            return frame[:at] + dice.randbytes(end - at) + frame[end:]
        case 4:  # missing
            return frame[:at] + frame[end:]
        case 5:  # twice
            return frame[:end] + frame[at:]
        case 6:  # a length or a number
            return frame[:at] + struct.pack(">I", dice.choice((0, 1, 2**16, 2**31, 2**32 - 1))) + frame[at + 4 :]
        case _:
            return frame[:at] + dice.choice(BOMBS) + frame[at:]
