"""A real server with faults: messages get lost, and the coordinator migrates requests all the time.

``python -m tests.e2e.faults FILE actorserve serve ...`` runs the module after FILE. In its process, and in every
process that it starts, the sockets have the faults in FILE. FILE holds JSON, and may change at any time:

- ``drop``, ``duplicate``, ``reorder``: the share of frames that are lost, arrive twice, or arrive after later frames;
- ``delay_s``: how long frames are in flight;
- ``garbage``, ``absurd``: the share of frames that are followed by a frame that is not a message, or by a message
  with impossible numbers or for another stage of a migration;
- ``cut``: the names of processes between which no frame arrives;
- ``restless``: whether the coordinator has workers move requests back and forth all the time.

Workers of two hosts of a cluster do not notice that they are on one machine, so their KV comes over tcp.

A transport guarantees order without duplicates. Membership relies on that, so its messages keep that guarantee here.
"""

import asyncio
import importlib
import json
import os
import random
import runpy
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import zmq

from actorserve.core.cluster.state import ClusterState
from actorserve.core.effects import Effect, Send
from actorserve.core.messages import (
    NEWCOMER,
    Copied,
    Declined,
    DeclineReason,
    Fenced,
    Goodbye,
    HandOver,
    Heartbeat,
    Hello,
    Keep,
    KVTicket,
    LoadReport,
    Members,
    Message,
    MigrateTo,
    Offer,
    Peer,
    PeerDown,
    PeerUp,
    RequestSpec,
    Resend,
    Role,
    SamplingParams,
    Stage,
    TransferId,
    TransferKind,
    Withdrawn,
)
from actorserve.processes import launch
from actorserve.wire.codec import decode, encode
from actorserve.wire.envelope import HeadReader, make_head, messages_in
from actorserve.wire.zmq_transport import ZmqTransport

_LOOK_EVERY_S: Final = 0.02
_REORDER_S: Final = 0.03
_ORDER_TTL_S: Final = 0.5
_ORDER_BYTES: Final = (2_000, 8_000)  # of the fake engine's KV: one request or a few
_MEMBERSHIP: Final = (Hello, Members, Heartbeat, Fenced, Goodbye)

_put: Callable[[ZmqTransport, Any, bytes], bool] = ZmqTransport._put


class Faults:
    """Applies the faults to the frames that this process sends."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._random = random.Random(zlib.crc32(" ".join(sys.argv).encode()) ^ os.getpid())
        self._rules: dict[str, Any] = {}
        self._changed_ns = 0
        self._next_look_s = 0.0
        self._heads = HeadReader()
        self._last_s: dict[int, float] = {}  # by link: the time at which its last delayed frame is sent

    def rules(self) -> dict[str, Any]:
        """The current rules in the file."""
        now = asyncio.get_running_loop().time()
        if now >= self._next_look_s:
            self._next_look_s = now + _LOOK_EVERY_S
            changed_ns = self._file.stat().st_mtime_ns
            if changed_ns != self._changed_ns:
                self._changed_ns = changed_ns
                self._rules = json.loads(self._file.read_text())
        return self._rules

    def put(self, transport: ZmqTransport, link: Any, frame: bytes) -> bool:
        """Replaces ``ZmqTransport._put``. While there are faults, each message of a bundle gets a frame of its own,
        because the faults are those of messages.
        """
        now = asyncio.get_running_loop().time()
        rules = self.rules()
        if rules.keys() <= {"restless"} and self._last_s.get(id(link), 0.0) <= now:
            return _put(transport, link, frame)
        addressed = self._heads.read(frame)
        head = make_head(addressed.sender, addressed.target)
        for message in messages_in(frame, addressed.body_at):
            self._put_message(transport, link, head + message, now)
        return True

    def _put_message(self, transport: ZmqTransport, link: Any, frame: bytes, now: float) -> None:
        rules, addressed = self._rules, self._heads.read(frame)
        names = {addressed.sender.name, addressed.target.name}
        if names <= set(rules.get("cut", ())) or self._is_hit("drop"):
            return
        is_membership = isinstance(decode(memoryview(frame)[addressed.body_at :]), _MEMBERSHIP)
        at_s = max(now + rules.get("delay_s", 0.0), self._last_s.get(id(link), 0.0))
        self._last_s[id(link)] = at_s
        if not is_membership and self._is_hit("reorder"):
            at_s += _REORDER_S * self._random.random()
        self._send_at(at_s, transport, link, frame)
        if not is_membership and self._is_hit("duplicate"):
            self._send_at(at_s + _REORDER_S * self._random.random(), transport, link, frame)
        head = frame[: addressed.body_at]
        if self._is_hit("garbage"):
            noise = self._random.randbytes(self._random.randrange(1, 100))
            cut = frame[: self._random.randrange(addressed.body_at, len(frame))]
            self._send_at(at_s, transport, link, self._random.choice([noise, head + noise, cut]))
        if self._is_hit("absurd"):
            self._send_at(at_s, transport, link, head + encode(self._absurd(addressed.sender)))

    def _is_hit(self, what: str) -> bool:
        return self._random.random() < float(self._rules.get(what, 0.0))

    def _send_at(self, at_s: float, transport: ZmqTransport, link: Any, frame: bytes) -> None:
        loop = asyncio.get_running_loop()

        def send() -> None:
            try:
                if not link.socket.closed:
                    _put(transport, link, frame)
            except zmq.ZMQError:
                pass  # the socket closes, so a late frame is lost

        if at_s <= loop.time():
            send()
        else:
            loop.call_at(at_s, send)

    def _absurd(self, me: Peer) -> Message:
        """A senseless message that changes no client's answer: it contains no tokens, ends or releases of requests."""
        pick: Callable[[Sequence[Any]], Any] = self._random.choice
        number, stage, huge = self._random.randrange(60), self._random.randrange(4), pick([0, 2**31, 2**62])
        transfer = TransferId(pick(list(TransferKind)), number)
        ticket = KVTicket(transfer, stage, pick([False, True]), tuple(range(pick([0, 1, 300]))), "")
        request = RequestSpec("absurd", (1,) * pick([0, 1, 50, 5000]), SamplingParams(seed=0, max_tokens=9))
        messages: list[Message] = [
            Copied(transfer, stage),
            Copied(TransferId(transfer.kind, huge), huge),
            Declined(transfer, DeclineReason.NO_BLOCKS),
            Withdrawn(transfer),
            Withdrawn(TransferId(transfer.kind, huge)),
            Offer(stage, me, request, pick([huge, 49]), ticket, pick([False, True])),
            Stage((1,) * pick([0, 1, 5000]), pick([huge, 40]), ticket, pick([False, True])),
            HandOver("absurd", stage, me, transfer, huge, NEWCOMER),
            Keep("absurd", stage),
            Resend("absurd", stage, huge),
            MigrateTo(me, huge, 1.0),
            MigrateTo(Peer("nobody", 1), 10_000, 1.0),
        ]
        return self._random.choice(messages)


class Restless:
    """Makes a coordinator's core order every worker to migrate requests to another worker all the time."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._random = random.Random(os.getpid())
        self._workers: list[Peer] = []
        self._handle = ClusterState.handle

    def handle(self, core: ClusterState, message: Message, now: float, sender: Peer | None) -> list[Effect]:
        """Replaces ``ClusterState.handle``."""
        effects = self._handle(core, message, now, sender)
        match message:
            case PeerUp(peer=peer, role=Role.WORKER):
                self._workers.append(peer)
            case PeerDown(peer=peer) if peer in self._workers:
                self._workers.remove(peer)
            case LoadReport() if sender is not None:
                others = [peer for peer in self._workers if peer != sender]
                if others and self._faults.rules().get("restless"):
                    to, num_bytes = self._random.choice(others), self._random.choice(_ORDER_BYTES)
                    effects.append(Send(sender, MigrateTo(to, num_bytes, _ORDER_TTL_S)))
        return effects


def main() -> None:
    """Patch the classes of this process, and run the module that the arguments name."""
    _, file, module, *arguments = sys.argv
    python = (sys.executable, "-P", "-m", "tests.e2e.faults", file)
    launch.python_command = lambda: python
    faults = Faults(Path(file))
    restless = Restless(faults)

    def handle(core: ClusterState, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        return restless.handle(core, message, now, sender)

    def put(transport: ZmqTransport, link: Any, frame: bytes) -> bool:
        return faults.put(transport, link, frame)

    if arguments[0] == "coordinator":
        ClusterState.handle = handle  # type: ignore[method-assign,assignment]
    ZmqTransport._put = put  # type: ignore[method-assign,assignment]
    if module == "workers" and "--host" in arguments:
        host = arguments[arguments.index("--host") + 1]
        importlib.import_module("workers.kv_transfer.transfer").this_host = lambda: host  # type: ignore[attr-defined]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
