"""The operators' socket: broken frames, and commands with absurd arguments. Acts are only tried dry."""

import random
from typing import Final

import zmq

from actorserve.core.messages import Command
from actorserve.core.operations.verbs import VERBS
from actorserve.wire.codec import encode
from tools.fuzzing.errors import BrokenServerError
from tools.fuzzing.messages import random_frame, twisted
from tools.fuzzing.mutations import BOMBS, mutated, random_bytes
from tools.fuzzing.targets.target import Recent

_FRAMES_A_CONSOLE: Final = 120  # a console may send a hundred at once
_SEND_TIMEOUT_MS: Final = 20_000
_ARGUMENTS: Final = (
    *(
        "",
        "0",
        "-1",
        "1",
        "worker-0",
        "worker-1",
        "worker-999",
        "all",
        "auto",
        "*",
        "../..",
        "migration.round_s",
        "nan",
    ),
    *(
        "inf",
        "1e400",
        "9" * 250,
        "x" * 256,
        "x" * 9000,
        "\x00",
        "\x1b[2J\n{}",
        "é" * 100,
        "--json",
        "\u202e",
        "[]",
        "True",
    ),
)


class ConsoleTarget:
    """Consoles that come and go."""

    def __init__(self, address: str) -> None:
        self.name = "console"
        self._address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def send(self, dice: random.Random, count: int, recent: Recent) -> None:
        """Raises: BrokenServerError if the socket takes nothing."""
        while count > 0:
            with self._context.socket(zmq.DEALER) as console:
                console.setsockopt(zmq.LINGER, 1000)
                console.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT_MS)
                console.connect(self._address)
                for _ in range(min(count, _FRAMES_A_CONSOLE)):
                    frames = self._frames(dice)
                    recent.add(self.name, b"|".join(frames)[:4096])
                    try:
                        console.send_multipart(frames)
                    except zmq.Again:
                        raise BrokenServerError(
                            f"the console's socket takes no frame for {_SEND_TIMEOUT_MS // 1000} s"
                        ) from None
                if dice.random() < 0.5:
                    console.poll(100)  # some read an answer
            count -= _FRAMES_A_CONSOLE

    def close(self) -> None:
        self._context.term()

    def _frames(self, dice: random.Random) -> list[bytes]:
        match dice.randrange(9):
            case 0:
                return [random_bytes(dice)]
            case 1:
                return [dice.choice(BOMBS)]
            case 2:
                return [random_frame(dice)] if dice.random() < 0.9 else [b"x" * 20_000]
            case 3:
                return [mutated(_command(dice, acts=False), dice)]  # a changed bit could be that of dry_run
            case 4:
                return [twisted(_command(dice, acts=False), dice)]
            case 5:
                return [b"", _command(dice)]
            case _:
                return [_command(dice)]


def _command(dice: random.Random, *, acts: bool = True) -> bytes:
    verb = dice.choice([verb for verb in VERBS.values() if acts or not verb.acts])
    arguments = tuple(dice.choice(_ARGUMENTS) for _ in range(dice.choice((len(verb.parameters), 0, 1, 2, 3, 30))))
    name = verb.name if verb.acts or dice.random() < 0.9 else dice.choice(_ARGUMENTS)
    return encode(Command(f"fuzz-{dice.getrandbits(32):08x}", name, arguments, dry_run=verb.acts))
