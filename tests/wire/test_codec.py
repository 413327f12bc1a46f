"""The codec: messages survive a round trip, and any bytes give a message or a ProtocolError."""

import contextlib
import dataclasses
import random
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings, strategies as st

from actorserve.core import messages as m
from actorserve.errors import ProtocolError
from actorserve.settings import HttpSettings
from actorserve.wire.codec import LOCAL_TAGS, MAX_FRAME_BYTES, WIRE_TAGS, decode, encode

_NATURAL = st.integers(0, 2**63 - 1)
_TOKEN_ID = st.integers(0, 2**31 - 1)
_POSITIVE = st.integers(1, 2**63 - 1)
_SIGNED = st.integers(-(2**63), 2**63 - 1)
_TEXT = st.text(max_size=40)
_FINITE = st.floats(allow_nan=False, allow_infinity=False)
_PEERS = st.builds(m.Peer, _TEXT, _NATURAL)


def _tuples(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=6).map(tuple)


_SAMPLING = st.builds(
    m.SamplingParams,
    seed=st.integers(0, 2**64 - 1),
    max_tokens=_POSITIVE,
    min_tokens=_NATURAL,
    temperature=_FINITE,
    top_p=_FINITE,
    top_k=_NATURAL,
    min_p=_FINITE,
    presence_penalty=_FINITE,
    frequency_penalty=_FINITE,
    repetition_penalty=_FINITE,
    logit_bias=_tuples(st.tuples(_NATURAL, _FINITE)),
    stop_token_ids=_tuples(_NATURAL),
    top_logprobs=st.integers(-1, 2**63 - 1),
    prompt_logprobs=st.integers(-1, 2**63 - 1),
    grammar=_TEXT,
)
_REQUESTS = st.builds(m.RequestSpec, _TEXT, _tuples(_TOKEN_ID), _SAMPLING, _tuples(_TOKEN_ID), _SIGNED, _TEXT)
_MODELS = st.builds(m.ModelInfo, _TEXT, _POSITIVE, _POSITIVE)

_ATTAINED = st.builds(m.Attained, _FINITE, _FINITE, _FINITE, _FINITE)
_KV = st.none() | st.builds(m.KVAccess, _TEXT, _TEXT, _NATURAL, _NATURAL, _TEXT, _TEXT, _TEXT, _TEXT)
_SPEEDS = st.none() | st.just(m.Speed((1, 2), (0.1, 0.2), 0.1))
_WORKERS = st.none() | st.builds(m.WorkerInfo, _TEXT, _MODELS, _SPEEDS, _KV)
_TRANSFERS = st.builds(m.TransferId, st.sampled_from(m.TransferKind), _NATURAL)
_TICKETS = st.builds(m.KVTicket, _TRANSFERS, _NATURAL, st.booleans(), _tuples(_NATURAL), _TEXT)


@st.composite
def _logprobs(draw: st.DrawFn, rows: int) -> tuple[m.TokenLogprobs | None, ...]:
    if draw(st.booleans()):
        return ()
    one = st.integers(0, 3).flatmap(
        lambda n: st.builds(
            m.TokenLogprobs,
            st.floats(allow_nan=False),
            st.tuples(*[_NATURAL] * n),
            st.tuples(*[st.floats(allow_nan=False)] * n),
        )
    )
    return tuple(draw(st.none() | one) for _ in range(rows))


@st.composite
def _prompt_logprobs(draw: st.DrawFn, rows: int) -> tuple[m.PromptLogprobs | None, ...]:
    if draw(st.booleans()):
        return ()
    one = st.integers(0, 3).flatmap(
        lambda n: st.builds(
            m.PromptLogprobs,
            _NATURAL,
            st.tuples(*[_NATURAL] * n),
            st.tuples(*[st.floats(allow_nan=False)] * n),
            st.tuples(*[_NATURAL] * n),
        )
    )
    return tuple(draw(st.none() | one) for _ in range(rows))


@st.composite
def _columnar(draw: st.DrawFn) -> m.Message:
    rows = draw(st.integers(0, 5))

    def column(inner: st.SearchStrategy[Any]) -> tuple[Any, ...]:
        return tuple(draw(inner) for _ in range(rows))

    if draw(st.booleans()):
        numbers = column(_NATURAL), column(_NATURAL)
        cached = column(_NATURAL) if draw(st.booleans()) else ()
        lengths = column(st.integers(1, 3)) if draw(st.booleans()) else ()
        num_tokens = sum(lengths) if lengths else rows
        token_ids = tuple(draw(_TOKEN_ID) for _ in range(num_tokens))
        logprobs, scores = draw(_logprobs(num_tokens)), draw(_prompt_logprobs(rows))
        waited_s = column(_FINITE) if draw(st.booleans()) else ()
        return m.Tokens(column(_TEXT), *numbers, token_ids, logprobs, cached, scores, lengths, waited_s)
    return m.Members(column(_TEXT), column(_NATURAL), column(st.sampled_from(m.Role)), column(_TEXT))


@st.composite
def _steps_done(draw: st.DrawFn) -> m.StepDone:
    rows = draw(st.integers(0, 5))
    request_ids, positions, token_ids = (draw(st.tuples(*[inner] * rows)) for inner in (_TEXT, _NATURAL, _TOKEN_ID))
    scores = draw(_prompt_logprobs(draw(st.integers(0, 5))))
    logprobs, failed = draw(_logprobs(rows)), draw(_tuples(_TEXT))
    return m.StepDone(draw(_NATURAL), draw(_FINITE), request_ids, positions, token_ids, logprobs, scores, failed)


_ROLES = st.sampled_from(m.Role)
LOCAL_MESSAGES: st.SearchStrategy[m.Message] = st.one_of(
    _steps_done(),
    st.sampled_from([m.Tick(), m.StartFailed()]),
    st.builds(m.PeerUp, _PEERS, _ROLES, _WORKERS, _NATURAL),
    st.builds(m.Serve, _NATURAL, _TEXT),
    st.builds(m.StandBy, _NATURAL, _TEXT),
    st.builds(m.PeerDown, _PEERS),
    st.builds(m.MemoryLimit, _NATURAL),
    st.builds(m.CopyDone, _NATURAL, _FINITE),
    st.builds(m.CopyFailed, _NATURAL),
    st.builds(m.GrammarReady, _TEXT),
    st.builds(m.Open, _REQUESTS),
    st.builds(m.Close, _TEXT, st.booleans()),
    st.builds(m.ActsDone, st.just(("a", "b")), st.just((m.Outcome.DONE, m.Outcome.REFUSED)), st.just(("x", "y"))),
)
_COLUMNS = st.builds(m.Column, _TEXT, _tuples(_TEXT), _tuples(_SIGNED), _tuples(st.floats(allow_nan=False)))
MESSAGES: st.SearchStrategy[m.Message] = st.one_of(
    LOCAL_MESSAGES,
    _columnar(),
    st.builds(m.Hello, _NATURAL, _ROLES, _TEXT, _WORKERS, _NATURAL, _TEXT, _TEXT, _TEXT),
    st.sampled_from([m.Heartbeat(), m.Goodbye(), m.Drain(), m.Drain(comes_back=True)]),
    st.builds(m.SetCordon, st.sampled_from(m.Cordon)),
    st.builds(m.Command, _TEXT, _TEXT, _tuples(_TEXT), st.booleans()),
    st.builds(m.Answer, _TEXT, st.sampled_from(m.Outcome), _TEXT, _tuples(_COLUMNS)),
    st.builds(m.Fenced, _NATURAL),
    st.builds(m.Serving, _NATURAL, _FINITE, st.booleans()),
    st.builds(m.Following, _NATURAL, st.none() | _PEERS, st.booleans()),
    st.builds(m.Place, _TEXT, _NATURAL, _NATURAL, _SIGNED, _TEXT, st.none() | _PEERS, _FINITE, _tuples(_TEXT)),
    st.builds(m.Placed, _TEXT, _NATURAL, _PEERS),
    st.builds(m.Refused, _TEXT, _NATURAL, st.sampled_from(m.RefusalReason), _FINITE),
    st.builds(m.Unplace, _TEXT, _NATURAL),
    st.builds(m.Start, _NATURAL, _REQUESTS, _ATTAINED, st.none() | st.builds(m.Transfer, _PEERS, _TRANSFERS)),
    st.builds(m.Started, _TEXT, _NATURAL),
    st.builds(m.Finished, _TEXT, _NATURAL, st.sampled_from(m.FinishReason), _NATURAL),
    st.builds(m.Release, _TEXT, _NATURAL, st.booleans()),
    st.builds(m.Resend, _TEXT, _NATURAL, _NATURAL),
    st.builds(m.LoadReport, *[_NATURAL] * 6, _POSITIVE, _POSITIVE, _NATURAL, _tuples(_TEXT), st.booleans()),
    st.builds(m.MigrateTo, _PEERS, _NATURAL, _FINITE),
    st.builds(m.Offer, _NATURAL, _PEERS, _REQUESTS, _NATURAL, _TICKETS, st.booleans()),
    st.builds(m.Stage, _tuples(_TOKEN_ID), _NATURAL, _TICKETS, st.booleans()),
    st.builds(m.Copied, _TRANSFERS, _NATURAL),
    st.builds(m.Declined, _TRANSFERS, st.sampled_from(m.DeclineReason)),
    st.builds(m.Withdrawn, _TRANSFERS),
    st.builds(m.HandOver, _TEXT, _NATURAL, _PEERS, st.none() | _TRANSFERS, _NATURAL, _ATTAINED),
    st.builds(m.Keep, _TEXT, _NATURAL),
    st.builds(m.CheckpointTo, _PEERS),
    st.builds(m.Checkpoint, _TEXT, _PEERS, _NATURAL, _tuples(_TOKEN_ID), _TICKETS),
    st.builds(m.CheckpointConfirmed, _TRANSFERS, _NATURAL),
    st.builds(m.Checkpointed, _TEXT, _NATURAL, _PEERS, _TRANSFERS),
)


@given(MESSAGES)
def test_a_message_survives_the_wire(message: m.Message) -> None:
    """Decoding an encoded message gives an equal message of the same classes, which encodes to the same bytes."""
    frame = encode(message)
    again = decode(frame, local=True)
    assert again == message
    assert repr(again) == repr(message)
    assert encode(again) == frame


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (m.LoadReport(1, 0, 0, 0, 0, 0, 1, 0, 0), "tokens_per_block"),
        (m.LoadReport(1, -1, 0, 0, 0, 0, 1, 1, 0), "num_running"),
        (m.LoadReport(1, 0, 0, 0, 0, 0, 1, 1, 2**63), "num_preemptions"),
        (m.LoadReport(1, 0, 0, 0, 0, 0, 1, 1, 0, checkpointed_bytes=-1), "checkpointed_bytes"),
        (m.Resend("r", 1, -1), "from_position"),
        (m.Tokens(("r",), (1,), (0,), (-1,)), "token_ids"),
        (m.Tokens(("r",), (1,), (0,), (2**31,)), "token_ids"),
        (m.Tokens(("r", "q"), (1, 1), (0, 0), (7,), run_lengths=(1, 0)), "run_lengths"),
        (m.Hello(1, m.Role.WORKER, "ipc://x", m.WorkerInfo("k", m.ModelInfo("m", 0, 1))), "vocab_size"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_a_number_out_of_range_is_refused(message: m.Message, field: str) -> None:
    """Negative counts and ids, ids of over four bytes, and sizes of zero are refused before the code uses them."""
    with pytest.raises(ProtocolError, match=rf"{field}.*out of range"):
        decode(encode(message))


def test_every_message_has_one_tag() -> None:
    """The registry holds every message class once, and no tag twice."""
    registered = [*WIRE_TAGS.values(), *LOCAL_TAGS.values()]
    assert sorted(cls.__name__ for cls in registered) == sorted(cls.__name__ for cls in m.Message.__args__)
    assert not WIRE_TAGS.keys() & LOCAL_TAGS.keys()


@given(LOCAL_MESSAGES)
def test_a_peer_cannot_send_local_messages(message: m.Message) -> None:
    """A frame with a local message is refused unless it comes from a journal."""
    with pytest.raises(ProtocolError, match=type(message).__name__):
        decode(encode(message))


@given(st.binary(max_size=300))
@example(b"")
@example(b"\xc1")
@example(b"\x91" * 100_000)
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xdb\xff\xff\xff\xff")
@example(b"\xdd\x00\x0f\xff\xff" * 5000)
@example(b"\x92\x16\xdd\x7f\xff\xff\xff")
@example(b"\xd6\xff\x00\x00\x00\x00")
@example(b"\x91\xcf\xff\xff\xff\xff\xff\xff\xff\xff")
@example(b"\x82\x91\x01\x02\x91\x01\x02")
def test_any_bytes_end_in_a_message_or_a_protocol_error(frame: bytes) -> None:
    """Random bytes, deep nesting and huge declared lengths raise nothing but ProtocolError."""
    try:
        message = decode(frame, local=True)
    except ProtocolError:
        return
    assert encode(decode(encode(message), local=True)) == encode(message)


@given(MESSAGES, st.data())
def test_a_damaged_frame_ends_in_a_message_or_a_protocol_error(message: m.Message, data: st.DataObject) -> None:
    """Flipping, cutting and inserting bytes in a valid frame raises nothing but ProtocolError."""
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame) - 1)) if frame else 0
        match data.draw(st.integers(0, 2)):
            case 0 if frame:
                frame[at] = data.draw(st.integers(0, 255))
            case 1:
                del frame[at : at + data.draw(st.integers(1, 3))]
            case _:
                frame[at:at] = data.draw(st.binary(max_size=3))
    with contextlib.suppress(ProtocolError):
        decode(bytes(frame), local=True)


_JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=12,
)


@given(st.sampled_from(sorted(WIRE_TAGS | LOCAL_TAGS)), st.data())
@settings(max_examples=300)
def test_well_packed_nonsense_ends_in_a_message_or_a_protocol_error(tag: int, data: st.DataObject) -> None:
    """Any msgpack values behind a valid tag, in the right number or not, raise nothing but ProtocolError."""
    arity = len(dataclasses.fields((WIRE_TAGS | LOCAL_TAGS)[tag]))
    values = data.draw(st.lists(_JUNK, min_size=arity, max_size=arity) | st.lists(_JUNK, max_size=12))
    try:
        message = decode(msgpack.packb([tag, *values]), local=True)
    except ProtocolError:
        return
    assert type(message) is (WIRE_TAGS | LOCAL_TAGS)[tag]


_TOKENS = m.Tokens(("a", "b"), (1, 1), (0, 7), (5, 6))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([22, ["a", "b"], [1, 1], [0, 7], [5], [], [], [], []], "columns"),
        ([22, ["a", "b"], [1, 1], [0, 7], [5, 6], [None], [], [], []], "columns"),
        ([22, ["a", "b"], [1, True], [0, 7], [5, 6], [], [], [], []], "epochs"),
        ([22, ["a", "b"], [1, 1.0], [0, 7], [5, 6], [], [], [], []], "epochs"),
        ([22, ["a", "b"], [1, 2**63], [0, 7], [5, 6], [], [], [], []], "range"),
        ([22, ["a", 1], [1, 1], [0, 7], [5, 6], [], [], [], []], "request_ids"),
        ([22, "ab", [1, 1], [0, 7], [5, 6], [], [], [], []], "request_ids"),
        ([22, ["a"], [1], [0], [5], [[0.5, [1], []]], [], [], []], "logprobs"),
        ([22, ["a", "b"], [1, 1], [0, 7], [5, 6], [], [4], [], []], "num_cached_tokens: columns"),
        ([22, ["a", "b"], [1, 1], [0, 7], [5, 6], [], [4, -1], [], []], "num_cached_tokens"),
        ([22, ["a"], [1], [0], [5], [], [], [None, None], []], "prompt_logprobs: columns"),
        ([22, ["a"], [1], [0], [5], [], [], [[1, [2, 3], [-0.5, -1.0], [1]]], []], "ranks: columns"),
        ([22, ["a"], [1], [0], [5], [], [], []], "fields"),
        ([2, ["a"], [1], ["emperor"], ["x"]], "Role"),
        ([21, "a", True], "epoch"),
        ([21, "a" * 1025, 1], "request_id: string longer than 1024 bytes"),
        ([21, "\u20ac" * 342, 1], "request_id: string longer than 1024 bytes"),
        ([22, ["a", "b" * 1025], [1, 1], [0, 7], [5, 6], [], [], [], []], "request_ids: string longer than 1024 bytes"),
        ([22, ["a", "b"], [1, 1], [0, 7], [5, 6], [], [], [], [2, 1]], "token_ids: columns"),
        ([22, ["a", "b"], [1, 1], [0, 7], [5, 6, 7], [None], [], [], [2, 1]], "logprobs: columns"),
        ([22, ["a", "b"], [1, 1], [0, 7], [5, 6], [], [], [], [2]], "run_lengths: columns"),
        ([22, ["a", "b"], [1, 1], [0, 7], [5, 6], [], [], [], [], [0.5]], "waited_s: columns"),
        ([21, "a" * (m.MAX_GRAMMAR_BYTES + 1), 1], "bounds"),
        ([12, "a", 1, "overloaded", float("nan"), [0.0, 0.0, 0.0, 0.0]], "retry_after_s"),
        ([12, "a", 1, "overloaded", float("inf"), [0.0, 0.0, 0.0, 0.0]], "finite"),
        ([11, "a", 1, ["w", 1, 2], 0.0], "instance"),
        ([True, "a"], "no tag"),
        ([99], "99"),
        (5, "no tag"),
        ({}, "no tag"),
    ],
)
def test_wrong_fields_are_named(values: Any, problem: str) -> None:
    """Wrong arity, types, ranges and columns are refused, and the error names the field."""
    with pytest.raises(ProtocolError, match=problem):
        decode(msgpack.packb(values))


def test_a_valid_frame_passes_where_its_neighbours_fail() -> None:
    """The frame from which the wrong frames above are made is itself accepted."""
    assert decode(msgpack.packb([22, ["a", "b"], [1, 1], [0, 7], [5, 6], [], [], [], []])) == _TOKENS


def test_too_large_a_frame_is_refused_unread() -> None:
    """A frame over the size limit is refused before it is decoded."""
    with pytest.raises(ProtocolError, match="too large"):
        decode(bytes(MAX_FRAME_BYTES + 1))


def test_logprobs_may_be_infinite_and_seeds_use_all_bits() -> None:
    """Minus infinity passes in log-probabilities, and a seed of 2**64 - 1 in sampling parameters."""
    tokens = dataclasses.replace(_TOKENS, logprobs=(m.TokenLogprobs(float("-inf"), (1,), (float("-inf"),)), None))
    assert decode(encode(tokens)) == tokens
    start = m.Start(1, m.RequestSpec("r", (1, 2), m.SamplingParams(seed=2**64 - 1, max_tokens=5)))
    assert decode(encode(start)) == start


@pytest.mark.parametrize("letter", ["g", "\u20ac"])
def test_a_grammar_may_be_long(letter: str) -> None:
    """A grammar of 256 KiB passes, and one more character is refused."""
    longest = letter * (m.MAX_GRAMMAR_BYTES // len(letter.encode()))

    def start(grammar: str) -> m.Start:
        return m.Start(1, m.RequestSpec("r", (1, 2), m.SamplingParams(seed=1, max_tokens=5, grammar=grammar)))

    assert decode(encode(start(longest))) == start(longest)
    with pytest.raises(ProtocolError):
        decode(encode(start(longest + letter)))


@pytest.mark.parametrize("name", ["shared", "shared_host", "cuda_ipc"])
def test_names_of_memory_may_be_long(name: str) -> None:
    """In a Hello, what names a pool's memory may have 64 KiB, as a network card's names of memory do. One byte more is
    refused by name.
    """

    def hello(long_name: str) -> m.Hello:
        access = m.KVAccess("layout", "ipc://kv", **{name: long_name})  # type: ignore[arg-type]
        return m.Hello(1, m.Role.WORKER, "a", m.WorkerInfo("kind", m.ModelInfo("m", 10, 10), kv=access))

    longest = "n" * m.MAX_MEMORY_NAME_BYTES
    assert decode(encode(hello(longest))) == hello(longest)
    with pytest.raises(ProtocolError, match=rf"worker: kv: {name}: string longer than 65536 bytes"):
        decode(encode(hello(longest + "n")))


def test_strings_of_1024_bytes_pass() -> None:
    """The bound on strings counts bytes, and a string may have all of them, alone and in a column."""
    names = ("a" * 1024, "\u20ac" * 341)
    assert decode(encode(m.Members(names, (1, 2), (m.Role.WORKER,) * 2, names))).names == names  # type: ignore[union-attr]


def test_a_long_prompt_passes() -> None:
    """A prompt of 200,000 tokens fits a frame."""
    chance = random.Random(0)
    prompt = tuple(chance.randrange(200_000) for _ in range(200_000))
    start = m.Start(1, m.RequestSpec("r", prompt, m.SamplingParams(seed=1, max_tokens=5)))
    assert decode(encode(start)) == start


def test_the_longest_scores_of_a_prompt_pass() -> None:
    """As many log-probabilities as a server can be set to give fit a frame, whatever their values."""
    most = HttpSettings.model_json_schema()["properties"]["max_prompt_logprobs"]["maximum"]
    scores = m.PromptLogprobs(0, (2**31,) * most, (-0.1,) * most, (2**31,) * most)
    tokens = m.Tokens(("r",), (1,), (0,), (7,), prompt_logprobs=(scores,))
    assert decode(encode(tokens)) == tokens
