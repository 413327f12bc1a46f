"""Trust: which keys count, what their holders may send, and what is refused."""

import dataclasses
import logging
from collections import Counter

import pytest

from actorserve.core.messages import (
    Answer,
    Drain,
    Following,
    Heartbeat,
    Hello,
    LoadReport,
    Members,
    Place,
    PowerReport,
    Role,
    SetPowerCaps,
    Start,
    Tokens,
)
from actorserve.wire.codec import WIRE_TAGS
from actorserve.wire.curve.addresses import is_reachable_from_elsewhere
from actorserve.wire.refusals import Refusals
from actorserve.wire.senders import SENDERS, role_of
from actorserve.wire.trust import (
    UNKNOWN_KEY,
    WRONG_HOST,
    WRONG_KIND,
    WRONG_ROLE,
    Holder,
    HolderKind,
    HostKey,
    KeyPair,
    PublicKeys,
    Trust,
    TrustError,
)
from tests.wire.keys import make_pair

ALPHA, BETA, ANN, EVE, STRANGER, ACTUATOR = (make_pair() for _ in range(6))
KEYS = PublicKeys(
    hosts={
        "alpha": HostKey(ALPHA.public_key),
        "beta": HostKey(BETA.public_key, frozenset({Role.WORKER}), ACTUATOR.public_key),
    },
    operators={"ann": ANN.public_key},
    viewers={"eve": EVE.public_key},
)


def test_every_message_has_senders() -> None:
    """Every message of the wire says which processes may send it."""
    assert set(SENDERS) == set(WIRE_TAGS.values())


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("alpha/worker-0", Role.WORKER),
        ("alpha/gateway-12", Role.GATEWAY),
        ("coordinator", Role.COORDINATOR),
        ("alpha/coordinator-1", Role.COORDINATOR),
        ("alpha/power", Role.POWER),
        ("power", Role.POWER),
        ("alpha", None),
        ("worker/ghost-0", None),
        ("", None),
    ],
)
def test_a_name_tells_its_role(name: str, role: Role | None) -> None:
    """The word before the number is the role; other names have none."""
    assert role_of(name) is role


@pytest.mark.parametrize(
    ("key", "sender", "refusal"),
    [
        (ALPHA, "alpha/worker-0", None),
        (ALPHA, "coordinator", None),
        (BETA, "beta/worker-3", None),
        (STRANGER, "alpha/worker-0", UNKNOWN_KEY),
        (BETA, "alpha/worker-0", WRONG_HOST),
        (BETA, "beta2/worker-0", WRONG_HOST),
        (BETA, "worker-0", WRONG_HOST),
        (BETA, "coordinator", WRONG_ROLE),
        (BETA, "beta/gateway-0", WRONG_ROLE),
        (BETA, "beta/ghost-0", WRONG_ROLE),
        (ACTUATOR, "beta/power", None),
        (ACTUATOR, "alpha/power", WRONG_HOST),
        (ACTUATOR, "beta/worker-0", WRONG_ROLE),
        (BETA, "beta/power", WRONG_ROLE),
        (ALPHA, "alpha/power", WRONG_ROLE),
        (ANN, "ann/worker-0", WRONG_KIND),
        (EVE, "coordinator", WRONG_KIND),
    ],
)
def test_a_sender_is_judged_by_its_key(key: KeyPair, sender: str, refusal: str | None) -> None:
    """A process may only have a name of its key's host, with a role that is allowed there."""
    assert Trust(ALPHA, KEYS).rights_of(key.public_key, sender).refusal == refusal


@pytest.mark.parametrize(
    ("key", "sender", "may", "may_not"),
    [
        (ALPHA, "coordinator", (Hello, Members, Drain, Heartbeat), (Tokens, Start, LoadReport)),
        (ALPHA, "alpha/gateway-0", (Hello, Start, Place), (Members, Drain, Tokens, LoadReport)),
        (BETA, "beta/worker-0", (Hello, Tokens, LoadReport), (Members, Drain, Start, Place)),
        (ACTUATOR, "beta/power", (Hello, Following, PowerReport), (Members, SetPowerCaps, LoadReport, Answer, Start)),
        (ALPHA, "coordinator", (SetPowerCaps,), (PowerReport,)),
        (EVE, "eve/console-0", (), (Hello, Members, Drain, Start, Tokens)),
        (STRANGER, "beta/worker-0", (), (Hello, Tokens)),
    ],
)
def test_a_role_may_send_its_messages_alone(
    key: KeyPair, sender: str, may: tuple[type, ...], may_not: tuple[type, ...]
) -> None:
    """A worker sends no coordinator's message, a gateway no worker's, and a viewer's key none of them."""
    rights = Trust(ALPHA, KEYS).rights_of(key.public_key, sender)
    assert rights.messages.issuperset(may)
    assert rights.messages.isdisjoint(may_not)


def test_keys_are_looked_up() -> None:
    """A key leads to its holder, and a process's name to the key of its host."""
    trust = Trust(ALPHA, KEYS)
    assert trust.holder_of(ANN.public_key) == Holder(HolderKind.OPERATOR, "ann")
    assert trust.holder_of(STRANGER.public_key) is None
    assert trust.key_of_process("beta/worker-7") == BETA.public_key
    assert trust.key_of_process("beta/power") == ACTUATOR.public_key
    assert trust.key_of_process("alpha/power") is None, "it has no actuator"
    assert trust.key_of_process("coordinator") == ALPHA.public_key
    assert trust.key_of_process("ann/console-0") is None
    assert trust.key_of_process("gamma/worker-0") is None


def test_replaced_keys_count_at_once() -> None:
    """After a replacement, a removed key is unknown and an added one counts, also where it was asked about before."""
    trust, told = Trust(ALPHA, KEYS), []
    trust.on_change(lambda: told.append(trust.keys))
    assert trust.rights_of(BETA.public_key, "beta/worker-0").refusal is None
    assert trust.rights_of(STRANGER.public_key, "gamma/worker-0").refusal == UNKNOWN_KEY
    new = PublicKeys({"alpha": HostKey(ALPHA.public_key), "gamma": HostKey(STRANGER.public_key)})
    trust.replace(new)
    assert told == [new]
    assert trust.rights_of(BETA.public_key, "beta/worker-0").refusal == UNKNOWN_KEY
    assert trust.rights_of(STRANGER.public_key, "gamma/worker-0").refusal is None
    assert Tokens not in trust.rights_of(BETA.public_key, "beta/worker-0").messages


def test_a_process_needs_the_key_pair_of_its_host() -> None:
    """Our own key pair must be the one that the cluster has for our host."""
    Trust(ALPHA, KEYS).check_own("alpha/worker-0")
    for own, name in ((BETA, "alpha/worker-0"), (BETA, "beta/gateway-0"), (STRANGER, "gamma/worker-0")):
        with pytest.raises(TrustError, match="cannot take part"):
            Trust(own, KEYS).check_own(name)


def _keys(**changes: object) -> PublicKeys:
    return dataclasses.replace(KEYS, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"operators": {"alpha": ANN.public_key}}, "host alpha and operator alpha have the same name"),
        ({"viewers": {"eve": ANN.public_key}}, "operator ann and viewer eve have the same public key"),
        ({"operators": {"a/b": ANN.public_key}}, "cannot be a name"),
        ({"operators": {"a\nb": ANN.public_key}}, "cannot be a name"),
        ({"operators": {"": ANN.public_key}}, "cannot be a name"),
        ({"operators": {"coordinator": ANN.public_key}}, "cannot be a name"),
        ({"operators": {"x" * 65: ANN.public_key}}, "cannot be a name"),
        ({"operators": {"ann": ANN.public_key[:-1]}}, "not a key"),
        ({"operators": {"ann": "0" * 40}}, "not a key"),
        ({"operators": {"ann": "#" * 40}}, "not a key"),
        ({"operators": {"ann": "é" * 40}}, "not a key"),
    ],
)
def test_contradicting_keys_are_refused(changes: dict[str, object], why: str) -> None:
    """Names and keys with two holders, and malformed ones, are errors of one line that says what is wrong."""
    with pytest.raises(TrustError, match=why) as raised:
        _keys(**changes)
    assert "\n" not in str(raised.value)


def test_a_secret_key_is_not_shown() -> None:
    """Neither the text of a key pair, nor the error about a malformed one, contains the secret key."""
    assert ALPHA.secret_key not in repr(ALPHA)
    with pytest.raises(TrustError) as raised:
        KeyPair(ALPHA.public_key, ALPHA.secret_key + "x")
    assert ALPHA.secret_key not in str(raised.value)


def test_refusals_are_counted_and_logged_once_a_key(caplog: pytest.LogCaptureFixture) -> None:
    """Each refusal counts. A key is logged once an hour for a reason, and at most 20 lines come in a minute."""
    now, counts = 0.0, Counter[str]()
    refusals = Refusals("alpha/worker-0", counts, lambda: now)
    for _ in range(3):
        refusals.refuse(UNKNOWN_KEY, "one", "a connection from 10.0.0.9")
    assert caplog.messages == ["alpha/worker-0: refused a connection from 10.0.0.9: unknown key (one)"]
    for number in range(100):
        refusals.refuse(UNKNOWN_KEY, f"key {number}", "a connection")
    assert len(caplog.messages) == 20
    now = 61.0
    refusals.refuse(UNKNOWN_KEY, "one", "a connection")
    refusals.refuse(UNKNOWN_KEY, "late", "a connection")
    assert len(caplog.messages) == 21
    now = 3601.0
    refusals.refuse(UNKNOWN_KEY, "one", "a connection")
    assert len(caplog.messages) == 22
    assert counts == {"refused: unknown key": 106}
    assert all(record.levelno == logging.WARNING for record in caplog.records)


@pytest.mark.parametrize(
    ("address", "is_reachable"),
    [
        ("ipc:///tmp/x", False),
        ("tcp://127.0.0.1:*", False),
        ("tcp://127.8.9.1:5000", False),
        ("tcp://localhost:5000", False),
        ("tcp://[::1]:5000", False),
        ("tcp://*:5000", True),
        ("tcp://0.0.0.0:5000", True),
        ("tcp://[::]:5000", True),
        ("tcp://10.0.0.1:5000", True),
        ("tcp://eth0:5000", True),
        ("tcp://127.0.0.1.example:5000", True),
        ("tcp://127.0.0.1:0;10.0.0.1:5000", True),
    ],
)
def test_only_loopback_stays_on_the_machine(address: str, is_reachable: bool) -> None:
    """Every tcp address counts as reachable by other machines, unless it is certainly loopback's."""
    assert is_reachable_from_elsewhere(address) is is_reachable
