"""The ROUTERs of coordinator, gateways and workers.

Without keys a process of the same user can join the cluster, and with keys whatever holds the host's can. So a gateway
that is ours joins first: its frames reach the cores. Nothing is sent in another process's name that this process would
be believed, because that process could end the server anyhow.
"""

import random
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Self

import zmq

from actorserve.core import messages as m
from actorserve.core.messages import Message, Peer, Role
from actorserve.errors import ProtocolError
from actorserve.wire.codec import WIRE_TAGS, decode, encode
from actorserve.wire.curve.sockets import connect_with_curve
from actorserve.wire.envelope import ANY_INCARNATION, HeadReader, make_bundle, make_head
from actorserve.wire.senders import MESSAGES_OF
from actorserve.wire.trust import KeyPair
from tools.fuzzing.errors import BrokenServerError, FuzzError
from tools.fuzzing.messages import random_frame, random_message, twisted
from tools.fuzzing.mutations import BOMBS, mutated, random_bytes
from tools.fuzzing.targets.target import Recent

_SEND_TIMEOUT_MS: Final = 20_000
_JOIN_TIMEOUT_S: Final = 20.0
_QUEUE: Final = 200
_STRANGERS: Final = tuple(
    f"{role.value}-{number}" for role in (Role.GATEWAY, Role.WORKER) for number in range(900, 908)
)
_OURS: Final = tuple(sorted(MESSAGES_OF[Role.GATEWAY] - {m.Hello, m.Goodbye, m.Fenced}, key=lambda cls: cls.__name__))
_HUGE: Final = b"\xdd\x00\x0f\xff\xff" + b"\x01" * 2**20
_TOO_LARGE: Final = b"x" * (16 * 2**20 + 10)
_REPLAYED: Final = 500
_POOL: Final = 400


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a process must know to join. ``own_address``: where our gateway listens."""

    coordinator: str
    own_address: str
    cluster_id: str = ""
    prefix: str = ""  # of the names of processes
    keys: KeyPair | None = None  # of the host, if there are any: its processes share them

    def secure(self, socket: "zmq.Socket[bytes]") -> None:
        """Let a socket that connects show the host's key, so that what it sends is read."""
        if self.keys is not None:
            connect_with_curve(socket, self.keys, self.keys.public_key)


class Insider:
    """A gateway of ours that has joined the cluster: it knows every process and its incarnation.

    Raises: FuzzError if nothing answers.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", cluster: Cluster, life: int) -> None:
        self.me = Peer(f"{cluster.prefix}gateway-990", life)
        self._router = context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.RCVHWM, 10)  # what the cluster sends us is lost beyond this
        if cluster.keys is not None:  # without a domain of ZAP, so that every key is accepted
            self._router.setsockopt(zmq.CURVE_SERVER, 1)
            self._router.setsockopt(zmq.CURVE_SECRETKEY, cluster.keys.secret_key.encode())
        self._router.bind(cluster.own_address)
        address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.hello = encode(m.Hello(m.PROTOCOL_VERSION, Role.GATEWAY, address, cluster_id=cluster.cluster_id))
        self.members: dict[Peer, str] = {}
        self.following = b""  # what makes the coordinator take us
        with context.socket(zmq.DEALER) as asking:
            asking.setsockopt(zmq.LINGER, 0)
            cluster.secure(asking)
            asking.connect(cluster.coordinator)
            coordinator = Peer(f"{cluster.prefix}coordinator", ANY_INCARNATION)
            asking.send(make_head(self.me, coordinator) + self.hello)
            try:
                self._wait_for_members(cluster.coordinator)
            except FuzzError:
                self.close()
                raise

    def _wait_for_members(self, coordinator_address: str) -> None:
        reader, coordinator = HeadReader(), Peer("", 0)
        until_s = time.monotonic() + _JOIN_TIMEOUT_S
        while (left_s := until_s - time.monotonic()) > 0:
            if not self._router.poll(1 + int(1000 * left_s)):
                break
            frame = self._router.recv_multipart()[-1]
            sender, _, body_at = reader.read(frame)
            message = decode(frame[body_at:])
            if isinstance(message, m.Hello):
                coordinator = sender
            if isinstance(message, m.Members) and coordinator.name:
                rows = zip(message.names, message.incarnations, message.addresses, strict=True)
                self.members = {Peer(name, life): address for name, life, address in rows if name != self.me.name}
                self.members[coordinator] = coordinator_address
            if isinstance(message, m.Serving):
                self.following = encode(m.Following(message.term, sender, True))
            if self.members and self.following:
                return
        raise FuzzError("the coordinator lets no gateway join")

    def forget_what_came(self) -> None:
        with suppress(zmq.Again):
            while True:
                self._router.recv_multipart(zmq.NOBLOCK)

    def close(self) -> None:
        self._router.close(0)


@dataclass(frozen=True, slots=True)
class Pools:
    """Messages that are made once for many frames, because making one takes longer than sending it."""

    ours: tuple[bytes, ...]  # that a gateway may send
    strangers: tuple[bytes, ...]  # of any kind, except Hello

    @classmethod
    def fresh(cls, dice: random.Random) -> Self:
        ours = tuple(encode(_bounded(random_message(dice.choice(_OURS), dice), dice)) for _ in range(_POOL))
        return cls(ours, tuple(random_frame(dice, _NO_HELLO) for _ in range(_POOL)))


def _bounded(message: Message, dice: random.Random) -> Message:
    """Few requests get very long answers, because a worker then computes until our gateway leaves."""
    if not isinstance(message, m.Start) or dice.random() < 0.01:
        return message
    sampling = replace(message.request.sampling, max_tokens=dice.choice((1, 5, 50)))
    return replace(message, request=replace(message.request, sampling=sampling))


class ControlTarget:
    """All processes of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.name = "control"
        self._cluster = cluster
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._life = 0
        self._sent: list[bytes] = []
        self._links: dict[Peer, zmq.Socket[bytes]] = {}

    def send(self, dice: random.Random, count: int, recent: Recent) -> None:
        """Raises: BrokenServerError, FuzzError."""
        self._life += 1
        insider = Insider(self._context, self._cluster, self._life)
        try:
            self._connect(insider)
            targets, pools = sorted(self._links), Pools.fresh(dice)
            for peer in targets:
                head = make_head(insider.me, peer)
                self._put(peer, [head + insider.hello], recent)
                self._put(peer, [head + insider.following], recent)
            for number in range(count):
                peer = dice.choice(targets)
                self._put(peer, self._frames(insider, peer, targets, pools, dice), recent)
                if number % 100 == 0:
                    insider.forget_what_came()
            for peer in targets:
                self._put(peer, [make_head(insider.me, peer) + encode(m.Goodbye())], recent)
        finally:
            insider.close()

    def close(self) -> None:
        for link in self._links.values():
            link.close(0)
        self._context.term()

    def _connect(self, insider: Insider) -> None:
        for peer, address in insider.members.items():
            if peer not in self._links and peer.name.rpartition("/")[2] not in _STRANGERS:
                link = self._links[peer] = self._context.socket(zmq.DEALER)
                link.setsockopt(zmq.LINGER, 0)
                link.setsockopt(zmq.SNDHWM, _QUEUE)
                link.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT_MS)
                self._cluster.secure(link)
                link.connect(address)

    def _put(self, peer: Peer, frames: list[bytes], recent: Recent) -> None:
        recent.add(peer.name, b"|".join(frames)[:4096])
        try:
            self._links[peer].send_multipart(frames)
        except zmq.Again:
            raise BrokenServerError(f"{peer.name} reads no frame for {_SEND_TIMEOUT_MS // 1000} s") from None

    def _frames(
        self, insider: Insider, peer: Peer, targets: list[Peer], pools: Pools, dice: random.Random
    ) -> list[bytes]:
        stranger = Peer(dice.choice(_STRANGERS), dice.randint(1, 3))
        match dice.randrange(20):
            case 0:
                return [random_bytes(dice)]
            case 1:  # the envelope is broken
                return [mutated(make_head(stranger, peer), dice) + dice.choice(pools.strangers)]
            case 2:
                return [make_head(stranger, peer) + dice.choice(pools.strangers)]
            case 3 | 4:  # in the name of a process of the cluster, but no message
                return [
                    self._broken(
                        make_head(dice.choice(targets), peer),
                        mutated(dice.choice(pools.strangers), dice),
                        stranger,
                        peer,
                    )
                ]
            case 5:
                return [
                    self._broken(
                        make_head(dice.choice(targets), peer),
                        twisted(dice.choice(pools.strangers), dice),
                        stranger,
                        peer,
                    )
                ]
            case 6:  # for another incarnation
                wrong = peer._replace(incarnation=dice.choice((1, peer.incarnation + 1, 2**62)))
                return [make_head(dice.choice(targets), wrong) + dice.choice(pools.strangers)]
            case 7:  # of an older incarnation
                older = dice.choice(targets)
                older = older._replace(incarnation=max(1, older.incarnation - dice.randint(1, 3)))
                return [make_head(older, peer) + dice.choice(pools.strangers)] if older not in targets else [b""]
            case 8:
                return [make_head(dice.choice((insider.me, stranger)), peer) + dice.choice(BOMBS)]
            case 9:
                return [
                    make_head(insider.me, peer) + b"\x93" + bytes([dice.choice((1, 22, 30, 60))]) + dice.choice(BOMBS)
                ]
            case 10:
                return [random_bytes(dice) for _ in range(dice.choice((2, 3, 50)))]
            case 11 if dice.random() < 0.02:
                return [make_head(insider.me, peer) + dice.choice((_HUGE, _TOO_LARGE))]
            case 12 if self._sent:  # again
                return [dice.choice(self._sent)]
            case 13 if dice.random() < 0.2:
                return [make_head(stranger, peer._replace(incarnation=ANY_INCARNATION)) + _hello(dice)]
            case 14:  # a bundle that is broken, or of a stranger
                head = make_head(stranger, peer)
                return [mutated(make_bundle(head, dice.choices(pools.strangers, k=dice.randint(1, 5))), dice)]
            case 15:  # a bundle of which some messages are none
                bodies = [*dice.choices(pools.ours, k=3), random_bytes(dice), dice.choice(BOMBS)]
                return [make_bundle(make_head(insider.me, peer), dice.sample(bodies, len(bodies)))]
            case _:
                frame = make_head(insider.me, peer) + dice.choice(pools.ours)
                if len(self._sent) < _REPLAYED:
                    self._sent.append(frame)
                else:
                    self._sent[dice.randrange(_REPLAYED)] = frame
                return [frame]

    def _broken(self, head: bytes, body: bytes, stranger: Peer, peer: Peer) -> bytes:
        """With ``head`` if ``body`` is no message, and otherwise of a stranger."""
        try:
            decode(body)
        except ProtocolError:
            return head + body
        return make_head(stranger, peer) + encode(m.Heartbeat())


_NO_HELLO: Final = tuple(cls for cls in WIRE_TAGS.values() if cls is not m.Hello)


def _hello(dice: random.Random) -> bytes:
    """Of a process that does not fit here: another protocol, or another cluster."""
    message: Message = random_message(m.Hello, dice)
    assert isinstance(message, m.Hello | m.Heartbeat)
    if isinstance(message, m.Heartbeat):
        return encode(message)
    cluster = message.cluster_id or "another"
    return encode(
        m.Hello(message.protocol_version, message.role, message.address, message.worker, message.answers, cluster)
    )
