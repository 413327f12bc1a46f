"""Rounds of hostile input at one server. Processes are checked after each target, and answers after each round."""

import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from tools.fuzzing.errors import BrokenServerError
from tools.fuzzing.server import Server
from tools.fuzzing.targets.console import ConsoleTarget
from tools.fuzzing.targets.control import ControlTarget
from tools.fuzzing.targets.curve import CurveTarget
from tools.fuzzing.targets.http import JsonTarget, RawHttpTarget
from tools.fuzzing.targets.streams import KVTarget, ZmtpTarget
from tools.fuzzing.targets.target import Place, Recent, Target
from tools.fuzzing.witness import Witnesses

ROUND_FRAMES: Final = 20_000
SHARES: Final = {
    "control": 0.74,
    "ZMTP": 0.02,
    "CURVE": 0.02,
    "KV": 0.1,
    "console": 0.12,
    "HTTP, bytes": 0.018,
    "HTTP, JSON": 0.002,
}
"""Of the frames, by target. Servers without keys have no CURVE."""
_WARM_UP_SHARE: Final = 0.3
MAX_GROWTH_BYTES: Final = 24 * 2**20
"""Of a process after the warm-up. Bounded caches that fill up late take some megabytes."""
_SHORT_GROWTH_BYTES: Final = 96 * 2**20
"""The same if there are few rounds. A frame of 16 MiB, which the heap keeps for the next one, may come after their
warm-up.
"""
_FEW_ROUNDS: Final = 10


@dataclass(slots=True)
class Seen:
    """What was sent to one server, and its processes' memory after the warm-up and at the end, in bytes."""

    over: str
    frames: Counter[str] = field(default_factory=Counter)
    warm_rss_bytes: dict[str, int] = field(default_factory=dict)
    last_rss_bytes: dict[str, int] = field(default_factory=dict)
    num_answers: int = 0
    seconds: float = 0.0
    log_bytes: int = 0


class FailedRoundError(BrokenServerError):
    """``where``: the target and the round. ``recent``: the last frames, the newest last."""

    def __init__(self, reason: str, where: str, recent: Recent) -> None:
        super().__init__(f"{where}: {reason}")
        self.recent = list(recent.frames)


def targets_of(server: Server) -> list[Target]:
    curve = [] if server.keys is None else [CurveTarget(server.control_places(), server.keys)]
    return [
        *curve,
        ControlTarget(server.cluster),
        ZmtpTarget("ZMTP", server.control_places()),
        KVTarget("KV", server.kv_places()),
        ConsoleTarget(server.console_address),
        RawHttpTarget(Place("HTTP", ("127.0.0.1", server.http_port))),
        JsonTarget("127.0.0.1", server.http_port, server.model),
    ]


def fuzz(over: str, model: str, seed: str, num_frames: int, only: str | None, tell: Callable[[str], None]) -> Seen:
    """Send so many frames to a new server. Raises: FailedRoundError, FuzzError."""
    num_rounds = max(4, round(num_frames / ROUND_FRAMES))
    seen = Seen(over)
    began_s = time.monotonic()
    with Server(over, model) as server, ExitStack() as stack:
        witnesses = Witnesses(server)
        stack.callback(witnesses.close)
        targets = [target for target in targets_of(server) if only in (None, target.name)]
        for target in targets:
            stack.callback(target.close)
        total = sum(SHARES[target.name] for target in targets)
        for number in range(num_rounds):
            recent = Recent()
            for target in targets:
                count = max(1, round(num_frames / num_rounds * SHARES[target.name] / total))
                try:
                    target.send(random.Random(f"{seed}/{over}/{number}/{target.name}"), count, recent)
                    seen.frames[target.name] += count
                    server.check_processes()
                except BrokenServerError as broken:
                    raise FailedRoundError(str(broken), f"{over}, round {number}, {target.name}", recent) from None
            try:
                witnesses.check()
                server.check_processes()
            except BrokenServerError as broken:
                raise FailedRoundError(str(broken), f"{over}, after round {number}", recent) from None
            seen.last_rss_bytes = server.rss_bytes()
            if number < num_rounds * _WARM_UP_SHARE:
                seen.warm_rss_bytes = seen.last_rss_bytes
            most_bytes = MAX_GROWTH_BYTES if num_rounds >= _FEW_ROUNDS else _SHORT_GROWTH_BYTES
            _check_growth(seen, most_bytes, recent, number)
            shown = ", ".join(f"{name.rpartition('/')[2]} {size >> 20}" for name, size in seen.last_rss_bytes.items())
            tell(f"{over}, round {number + 1} of {num_rounds}: {seen.frames.total():,} frames; MiB: {shown}")
        seen.num_answers = sum(witnesses.num_answers)
        seen.log_bytes = server.log_bytes()
    seen.seconds = time.monotonic() - began_s
    return seen


def _check_growth(seen: Seen, most_bytes: int, recent: Recent, number: int) -> None:
    for name, size in seen.last_rss_bytes.items():
        growth = size - seen.warm_rss_bytes[name]
        if growth > most_bytes:
            raise FailedRoundError(f"{name} has grown by {growth >> 20} MiB", f"{seen.over}, round {number}", recent)
