"""``tools/bench power``: the power governor around fake GPUs whose power follows their load, in virtual time.

One host has eight GPUs, in a prompt pool and a token pool. The governor and the actuator's core are those of the
server. The GPUs' curves are those that the product ships (``core.power.curves``), and their source says what of them
is measured and what is assumed. Each round draws other noise.
"""

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from rich.console import Console

from actorserve.core.power.curves import CURVES
from actorserve.core.power.governor import CONTROL_PERIOD_S, PowerConfig
from tools.benchmarks.common.arguments import add_json, count
from tools.benchmarks.common.console import say
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.power.fake_gpus import FULL_WATTS, STEP_S, FakeHost
from tools.benchmarks.power.loop import HOST, Excess, Loop
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import machine_line, this_machine

LOOP_TITLE: Final = "Eight GPUs under a power budget"
GAIN_TITLE: Final = "Requests per second over those with even caps"
NUM_GPUS: Final = 8
_SHARES: Final = (0.9, 0.8, 0.75, 0.7, 0.6, 0.5)
_POOLS: Final = ((2, 6), (4, 4), (6, 2))  # prompt and token instances
_SETTLE_S: Final = 5.0
_WATCH_S: Final = 20.0
_EVEN_STEPS: Final = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=count, default=5, help="runs of each case (%(default)s)")
    add_json(parser)


@dataclass(frozen=True, slots=True)
class Correction:
    """What one happening led to: seconds until the caps kept the budget, and how long at a stretch, and by which part
    of the budget, the host drew more.
    """

    caps_s: float
    longest_s: float
    most_share: float


def loop_of(share: float, pools: tuple[int, int], kind: str, seed: int) -> Loop:
    """A host with a budget of this share of full power, which has settled."""
    rng = random.Random(f"{seed} {share} {pools} {kind}")
    host = FakeHost(*pools, kind, rng)
    loop = Loop(host, PowerConfig(budget_watts_of={HOST: share * _all_watts(kind)}, curves=CURVES[kind]), rng)
    loop.run(_SETTLE_S)
    return loop


def _all_watts(kind: str) -> float:
    return NUM_GPUS * FULL_WATTS[kind]


def _budget_falls(loop: Loop) -> None:
    loop.governor.set_budget(HOST, 0.75 * _all_watts("h100"))


def _load_comes(loop: Loop) -> None:
    loop.host.load = 0.0
    loop.run(_SETTLE_S)
    loop.excess = Excess()
    loop.host.load = 1.0


def _roles_change(loop: Loop) -> None:
    for gpu in loop.host.gpus:
        gpu.role = loop.host.gpus[0].role if gpu is loop.host.gpus[-1] else gpu.role


def _caps_are_forgotten(loop: Loop) -> None:
    for gpu in loop.host.gpus:
        gpu.cap_watts = gpu.full_watts


def _gpus_leak(loop: Loop) -> None:
    for gpu in loop.host.gpus:
        gpu.leak = 0.05


_HAPPENINGS: Final[dict[str, tuple[float, Callable[[Loop], None]]]] = {
    "the budget falls from 90 to 75 %": (0.9, _budget_falls),
    "load comes to an idle host, 75 %": (0.75, _load_comes),
    "a token instance becomes a prompt instance, 75 %": (0.75, _roles_change),
    "all GPUs forget their caps, 75 %": (0.75, _caps_are_forgotten),
    "all GPUs begin to draw 5 % more than they should, 75 %": (0.75, _gpus_leak),
}


def correction(name: str, seed: int) -> Correction:
    """Let this happen to a host with equal pools."""
    share, happen = _HAPPENINGS[name]
    loop = loop_of(share, (4, 4), "h100", seed)
    loop.run(random.Random(seed).uniform(0.0, 0.25))  # anywhere within a period
    loop.excess = Excess()
    happen(loop)
    caps_s = loop.run(_WATCH_S, lambda: loop.host.caps_watts <= loop.budget_watts)
    loop.run(_WATCH_S)
    return Correction(caps_s, loop.excess.longest_s, loop.excess.most_watts / loop.budget_watts)


def rate(share: float, pools: tuple[int, int], kind: str, seed: int, *, is_even: bool) -> float:
    """Requests in a second, in units of those at full power."""
    if is_even:
        host = FakeHost(*pools, kind, random.Random(seed))
        for gpu in host.gpus:
            gpu.cap_watts = share * gpu.full_watts
        for _ in range(_EVEN_STEPS):
            host.step()
        return host.num_requests / (_EVEN_STEPS * STEP_S)
    loop = loop_of(share, pools, kind, seed)
    before = loop.host.num_requests
    seconds = loop.run(_WATCH_S)
    return (loop.host.num_requests - before) / seconds


def tables(rounds: int) -> Iterator[FigureTable]:
    columns = (
        Column("until caps keep the budget", "s", 2),
        Column("longest time over the budget", "s", 2),
        Column("most over the budget", "%", 1),
    )
    rows = []
    for name in _HAPPENINGS:
        found = [correction(name, seed) for seed in range(rounds)]
        most = [100 * one.most_share for one in found]
        cells = ([one.caps_s for one in found], [one.longest_s for one in found], most)
        rows.append(Row(name, tuple(map(Figure.of, cells))))
    yield FigureTable(LOOP_TITLE, "what happens", columns, tuple(rows))
    cases = [(kind, pools) for kind in CURVES for pools in _POOLS]
    yield FigureTable(
        GAIN_TITLE,
        "budget, of full power",
        tuple(Column(f"{kind.upper()}, {prompt} prompt + {token} token", "x", 2) for kind, (prompt, token) in cases),
        tuple(
            Row(
                f"{share:.0%}",
                tuple(
                    Figure.of(
                        [
                            rate(share, pools, kind, seed, is_even=False) / rate(share, pools, kind, seed, is_even=True)
                            for seed in range(rounds)
                        ]
                    )
                    for kind, pools in cases
                ),
            )
            for share in _SHARES
        ),
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and report."""
    console = Console()
    machine = this_machine()
    say(console, machine_line(machine))
    say(console, f"control period {CONTROL_PERIOD_S:g} s, in virtual time")
    found = list(tables(arguments.rounds))
    for table in found:
        for row in table.rows:
            shown = zip(table.columns, row.cells, strict=True)
            texts = [f"{column.name} {cell.median:.2f} {column.unit}" for column, cell in shown if cell is not None]
            say(console, f"{row.name}: {', '.join(texts)}")
    save_figures(arguments, found, {"control_period_s": CONTROL_PERIOD_S}, machine)
    return 0
