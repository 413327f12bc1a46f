"""Messages <-> bytes: msgpack ``[tag, *fields]``, nested records as lists of their fields, enums by value.

Tags are stable: a message's tag is never given to another message. Decoding checks arity, types, bounds and equal
columns. For any bytes, it gives a message or raises a ``ProtocolError`` that names the tag.

Neighbouring versions of the protocol read each other's messages. Fields that the last version does not have are left
out where they have their defaults, and may be missing. Fields that the next version has added are ignored.
"""

from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any, Final, cast

import msgpack

from actorserve.core import messages as m
from actorserve.core.messages import Message
from actorserve.errors import ProtocolError
from actorserve.wire.schema import INT64_MAX, INT64_MIN, UINT64_MAX, Rules, Schema, SchemaError

MAX_FRAME_BYTES: Final = 16 * 2**20
MAX_COLLECTION_ITEMS: Final = 2**20

# Messages that a peer may send.
WIRE_TAGS: Final[dict[int, type[Message]]] = {
    1: m.Hello,
    2: m.Members,
    3: m.Heartbeat,
    4: m.Goodbye,
    5: m.Fenced,
    6: m.Serving,
    7: m.Following,
    10: m.Place,
    11: m.Placed,
    12: m.Refused,
    13: m.Unplace,
    20: m.Start,
    21: m.Started,
    22: m.Tokens,
    23: m.Finished,
    24: m.Release,
    25: m.Resend,
    30: m.LoadReport,
    31: m.LoadDigest,
    32: m.WantReports,
    40: m.MigrateTo,
    41: m.Offer,
    42: m.Stage,
    43: m.Copied,
    44: m.Declined,
    45: m.Withdrawn,
    46: m.HandOver,
    47: m.Keep,
    48: m.Drain,
    49: m.CheckpointTo,
    50: m.Checkpoint,
    51: m.CheckpointConfirmed,
    52: m.Checkpointed,
    53: m.SetCordon,
    54: m.SetRole,
    60: m.Command,
    61: m.Answer,
    62: m.Orders,
    70: m.SetPowerCaps,
    71: m.PowerReport,
}

# Local messages, from a process to its own core. A journal may hold them; a frame from a peer may not.
LOCAL_TAGS: Final[dict[int, type[Message]]] = {
    128: m.PeerUp,
    129: m.PeerDown,
    130: m.StepDone,
    131: m.Tick,
    133: m.Open,
    134: m.Close,
    135: m.MemoryLimit,
    136: m.CopyDone,
    137: m.CopyFailed,
    138: m.StartFailed,
    139: m.GrammarReady,
    140: m.ActsDone,
    141: m.Serve,
    142: m.StandBy,
    143: m.PowerRead,
    144: m.PowerReading,
}

_POSITIVE: Final = (1, INT64_MAX)
_SIGNED: Final = (INT64_MIN, INT64_MAX)
_TOKEN_ID: Final = (0, 2**31 - 1)  # the core keeps four bytes of each
_MEMORY_NAMES: Final = ("shared", "shared_host", "cuda_ipc")
_RULES: Final[dict[type, Rules]] = {
    m.Hello: Rules(added=("cluster_id", "model_digest", "tokenizer_digest", "takes_bundles")),
    m.PeerUp: Rules(added=("term",)),
    m.SamplingParams: Rules(
        bounds={
            "seed": (0, UINT64_MAX),
            "max_tokens": _POSITIVE,
            "top_logprobs": (-1, INT64_MAX),
            "prompt_logprobs": (-1, INT64_MAX),
        },
        long_strings={"grammar": m.MAX_GRAMMAR_BYTES},
    ),
    m.RequestSpec: Rules(bounds={"priority": _SIGNED, "prompt_token_ids": _TOKEN_ID, "output_token_ids": _TOKEN_ID}),
    m.Place: Rules(bounds={"priority": _SIGNED}),
    m.KVAccess: Rules(long_strings=dict.fromkeys(_MEMORY_NAMES, m.MAX_MEMORY_NAME_BYTES), added=("progress",)),
    m.KVTicket: Rules(added=("step_id", "by_layer")),
    m.Offer: Rules(added=("computing_s",)),
    m.ModelInfo: Rules(bounds={"vocab_size": _POSITIVE, "max_tokens": _POSITIVE}),
    m.Speed: Rules(columns=("prefill_tokens", "prefill_s")),
    m.LoadReport: Rules(
        bounds={"bytes_per_block": _POSITIVE, "tokens_per_block": _POSITIVE},
        added=(
            "num_in_batch",
            "cordon",
            "num_output_tokens",
            "num_by_level",
            "role",
            "num_decoding",
            "power",
            "decode_s",
            "prompt_energy_j",
            "token_energy_j",
            "kv_decoding_bytes",
        ),
    ),
    m.LoadDigest: Rules(columns=("workers", "reports"), added=("shown_on",)),
    m.TokenLogprobs: Rules(
        columns=("top_token_ids", "top_logprobs"), non_finite=frozenset({"logprob", "top_logprobs"})
    ),
    m.PromptLogprobs: Rules(columns=("token_ids", "logprobs", "ranks"), non_finite=frozenset({"logprobs"})),
    m.Members: Rules(columns=("names", "incarnations", "roles", "addresses")),
    m.Tokens: Rules(
        bounds={"run_lengths": _POSITIVE, "token_ids": _TOKEN_ID},
        columns=("request_ids", "epochs", "positions"),
        optional_columns=("num_cached_tokens", "prompt_logprobs", "run_lengths", "waited_s"),
        run_lengths="run_lengths",
        run_columns=("token_ids",),
        optional_run_columns=("logprobs",),
        added=("waited_s",),
    ),
    m.StepDone: Rules(
        bounds={"token_ids": _TOKEN_ID},
        columns=("request_ids", "positions", "token_ids"),
        optional_columns=("logprobs",),
    ),
    m.Stage: Rules(bounds={"token_ids": _TOKEN_ID}, added=("computing_s",)),
    m.Checkpoint: Rules(bounds={"token_ids": _TOKEN_ID}),
    m.Column: Rules(bounds={"integers": _SIGNED}, non_finite=frozenset({"numbers"})),
    m.Drain: Rules(added=("comes_back",)),
    m.Placed: Rules(added=("token_instance",)),
    m.Refused: Rules(added=("energy",)),
    m.Finished: Rules(added=("energy",)),
    m.HandOver: Rules(added=("energy",)),
    m.Start: Rules(added=("token_instance",)),
    m.MigrateTo: Rules(added=("decoding_only",)),
    m.Orders: Rules(columns=("verbs", "subjects", "values", "terms", "numbers")),
    m.ActsDone: Rules(columns=("command_ids", "outcomes", "texts")),
    m.SetPowerCaps: Rules(columns=("devices", "caps_watts")),
}

# What messages are made of.
NESTED: Final = (
    m.SamplingParams,
    m.TokenLogprobs,
    m.PromptLogprobs,
    m.RequestSpec,
    m.ModelInfo,
    m.Speed,
    m.Attained,
    m.Energy,
    m.KVAccess,
    m.WorkerInfo,
    m.KVTicket,
    m.RowShape,
    m.LoadReport,  # in a LoadDigest
    m.Column,
    m.DevicePower,
    m.PowerReading,
)


def added_fields(cls: type) -> tuple[str, ...]:
    """The fields of a message, or of a part of one, that the protocol's last version does not have."""
    return _RULES[cls].added if cls in _RULES else ()


_SCHEMA: Final = Schema(_RULES)
_CHECKERS: Final = {tag: (cls, _SCHEMA.record(cls)) for tag, cls in (WIRE_TAGS | LOCAL_TAGS).items()}


def _field_getter(cls: type) -> Callable[[Any], tuple[Any, ...]]:
    """What makes a tuple of a record's fields, without those at its end that were added and have their defaults."""
    getter = _all_fields_getter(cls)
    added = added_fields(cls)
    if not added:
        return getter
    defaults = tuple(field.default for field in fields(cls) if field.name in added)

    def changed_fields(record: Any) -> tuple[Any, ...]:
        values = getter(record)
        end = len(values)
        for default in reversed(defaults):
            if values[end - 1] != default:
                break
            end -= 1
        return values[:end]

    return changed_fields


def _all_fields_getter(cls: type) -> Callable[[Any], tuple[Any, ...]]:
    names = [field.name for field in fields(cls)]
    if not names:
        return lambda _: ()
    getter = attrgetter(*names)
    if len(names) == 1:
        return lambda record: (getter(record),)
    return cast("Callable[[Any], tuple[Any, ...]]", getter)


_GETTERS: Final = {cls: ((tag,), _field_getter(cls)) for tag, cls in (WIRE_TAGS | LOCAL_TAGS).items()}
_NESTED_GETTERS: Final = {cls: _field_getter(cls) for cls in NESTED}


def _pack_nested(record: Any) -> tuple[Any, ...]:
    getter = _NESTED_GETTERS.get(type(record))
    if getter is None:
        raise TypeError(f"the wire has no form for {type(record).__name__}")
    return getter(record)


def encode(message: Message) -> bytes:
    """The message's bytes; the same message always gives the same bytes.

    Raises: TypeError or OverflowError if a field does not match its annotation, which is a bug of the caller.
    """
    tag, getter = _GETTERS[type(message)]
    return cast("bytes", msgpack.packb(tag + getter(message), default=_pack_nested))


def decode(frame: bytes | memoryview, *, local: bool = False) -> Message:
    """The message that ``frame`` holds. ``local`` also allows local messages, as in a journal.

    Raises: ProtocolError, which names the tag if there is one. No bytes cause any other exception.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError("frame too large")
    try:
        # Decode arrays to lists, although tuples are wanted. For a list, msgpack only reserves the declared length and
        # touches no memory.
        values = msgpack.unpackb(
            frame,
            raw=False,
            use_list=True,
            strict_map_key=True,
            max_str_len=m.MAX_GRAMMAR_BYTES,  # the checkers bound other strings
            max_array_len=min(MAX_COLLECTION_ITEMS, len(frame)),
            max_map_len=0,
            max_bin_len=0,
            max_ext_len=0,
        )
    except (ValueError, RecursionError, MemoryError, msgpack.UnpackException):
        raise ProtocolError("frame is not msgpack within bounds") from None
    if type(values) is not list or not values or type(values[0]) is not int:
        raise ProtocolError("frame has no tag")
    tag = values[0]
    entry = _CHECKERS.get(tag)
    if entry is None:
        raise ProtocolError(f"tag {tag} is unknown")
    if not local and tag not in WIRE_TAGS:
        raise ProtocolError(f"tag {tag} ({entry[0].__name__}) is not for the wire")
    try:
        return cast("Message", entry[1](values[1:]))
    except SchemaError as error:
        raise ProtocolError(f"tag {tag} ({entry[0].__name__}): {error}") from None
