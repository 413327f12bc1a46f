"""Neighbouring versions of the protocol read each other's messages."""

import dataclasses

import msgpack
import pytest

from actorserve.core import messages as m
from actorserve.core.messages import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from actorserve.errors import ProtocolError
from actorserve.wire.codec import NESTED, WIRE_TAGS, added_fields, decode, encode
from actorserve.wire.schema import Rules, Schema, SchemaError

LAST_VERSION = 14
NUM_FIELDS = {
    "Hello": 5,
    "Members": 4,
    "Heartbeat": 0,
    "Goodbye": 0,
    "Fenced": 1,
    "Place": 8,
    "Placed": 4,
    "Refused": 5,
    "Unplace": 2,
    "Start": 4,
    "Started": 2,
    "Tokens": 8,
    "Finished": 4,
    "Release": 3,
    "Resend": 3,
    "LoadReport": 31,
    "LoadDigest": 2,
    "WantReports": 1,
    "MigrateTo": 3,
    "Offer": 6,
    "Stage": 4,
    "Copied": 2,
    "Declined": 2,
    "Withdrawn": 1,
    "HandOver": 6,
    "Keep": 2,
    "Drain": 0,
    "CheckpointTo": 1,
    "Checkpoint": 5,
    "CheckpointConfirmed": 2,
    "Checkpointed": 4,
    "SamplingParams": 15,
    "TokenLogprobs": 3,
    "PromptLogprobs": 4,
    "RequestSpec": 7,
    "ModelInfo": 3,
    "Speed": 3,
    "Attained": 6,
    "KVAccess": 8,
    "WorkerInfo": 4,
    "KVTicket": 5,
    "RowShape": 3,
}
"""How many fields the messages of ``LAST_VERSION``, and the parts of messages, have."""

HELLO_14 = msgpack.packb([1, 14, "worker", "ipc://x", None, 7])
"""A Hello as version 14 sends it."""


@pytest.mark.parametrize("cls", [*WIRE_TAGS.values(), *NESTED], ids=lambda cls: str(cls.__name__))
def test_new_fields_are_listed(cls: type) -> None:
    """A field that the last version does not have is the last of its message, and is listed in the codec's rules."""
    assert PROTOCOL_VERSION == LAST_VERSION + 1, "write down the last version's fields"
    num_old = NUM_FIELDS.get(cls.__name__)
    names = tuple(field.name for field in dataclasses.fields(cls))
    if num_old is not None:  # not a new message
        assert names[num_old:] == added_fields(cls)


def test_a_frame_of_the_last_version_is_read() -> None:
    """A Hello of version 14 lacks the fields that version 15 has added; their defaults hold."""
    assert decode(HELLO_14) == m.Hello(14, m.Role.WORKER, "ipc://x", None, 7)


def test_new_fields_at_their_defaults_are_not_sent() -> None:
    """A message without the new version's information has the last version's bytes."""
    assert encode(m.Hello(14, m.Role.WORKER, "ipc://x", None, 7)) == HELLO_14
    named = m.Hello(15, m.Role.WORKER, "ipc://x", None, 7, "lab")
    assert msgpack.unpackb(encode(named)) == [1, 15, "worker", "ipc://x", None, 7, "lab"]
    assert decode(encode(named)) == named


def test_a_frame_of_the_next_version_is_read() -> None:
    """Fields that the next version has added are ignored, in a message and in its parts."""
    hello = m.Hello(16, m.Role.WORKER, "a", m.WorkerInfo("kind", m.ModelInfo("m", 10, 10)), 7, "lab", "x", "y", True)
    values = msgpack.unpackb(encode(hello))
    values[4][1] += ["a new field", [1, 2]]
    assert decode(msgpack.packb([*values, 3.5, ["new"]])) == hello


def test_a_missing_old_field_is_refused() -> None:
    """Only fields that the last version does not have may be missing."""
    with pytest.raises(ProtocolError, match=r"Hello.*fields"):
        decode(msgpack.packb([1, 15, "worker", "ipc://x", None]))


def test_a_version_works_with_its_neighbours() -> None:
    """The oldest version that is accepted is the last one, or this one if the last one accepts no other."""
    assert PROTOCOL_VERSION - 1 <= OLDEST_PROTOCOL_VERSION <= PROTOCOL_VERSION


@dataclasses.dataclass(slots=True)
class _Grown:
    old: int
    new: tuple[int, ...] = ()
    newest: int = 3


def test_missing_fields_get_checked_defaults() -> None:
    """Each number of missing fields gives the right defaults, and present ones are checked as usual."""
    check = Schema({_Grown: Rules(added=("new", "newest"))}).record(_Grown)
    assert check([1]) == _Grown(1, (), 3)
    assert check([1, [2]]) == _Grown(1, (2,), 3)
    assert check([1, [2], 5, "more"]) == _Grown(1, (2,), 5)
    for wrong in ([], [1, ["x"]], [1, [], "x"]):
        with pytest.raises(SchemaError):
            check(wrong)


@pytest.mark.parametrize("added", [("old",), ("new",)])
def test_only_the_last_fields_can_be_new(added: tuple[str, ...]) -> None:
    """Rules that name other fields are a bug, found at import."""
    with pytest.raises(TypeError, match="not its last ones"):
        Schema({_Grown: Rules(added=added)}).record(_Grown)
