"""``tools/bench kernels``: registers, spills and shared memory of every Triton kernel, without a GPU.

The assembler that Triton brings tells registers and spills. The printed table also shows the instructions that multiply
matrices, and how many programs a processor holds at once by registers, shared memory and warps.
"""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from typing import Final

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tools.benchmarks.common.arguments import add_json, names
from tools.benchmarks.common.console import print_table, say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.kernels.compiled import Compiled, compile_launches
from tools.benchmarks.kernels.gpus import GPUS, programs_at_once
from tools.benchmarks.kernels.launches import LAUNCHES
from tools.figures.figure import Column, Figure, FigureTable, Row

CAPABILITIES: Final = tuple(GPUS)
_FIGURES: Final[Mapping[str, Callable[[Compiled], float]]] = {
    "registers of a thread": lambda compiled: compiled.registers,
    "spilled bytes of a thread": lambda compiled: compiled.spilled_bytes,
    "shared memory of a program, KiB": lambda compiled: compiled.shared_bytes / 1024,
}

Named = dict[str, Compiled]
"""By a name that is the same for every GPU: the launch's in `LAUNCHES`, and the kernel's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--capabilities",
        type=lambda text: tuple(map(int, names(text))),
        default=CAPABILITIES,
        help=f"compute capabilities times 10, with commas: {','.join(map(str, CAPABILITIES))}",
    )
    add_json(parser)


def measure(capability: int, console: Console) -> Named:
    """All kernels, for one kind of GPU."""
    found = {}
    for name, launch in track(LAUNCHES.items(), f"compiling for sm_{capability}", console=console, transient=True):
        for compiled in compile_launches(partial(launch, capability), capability):
            found[f"{name}: {compiled.kernel}"] = compiled
    return found


def show(capability: int, kernels: Named, console: Console) -> None:
    say(console, f"sm_{capability}")
    table = Table("kernel", "multiplies by", "warps", "registers", "spilled B", "shared KiB", "programs at once")
    for name, compiled in kernels.items():
        table.add_row(
            name,
            "\n".join(compiled.instructions),
            str(compiled.warps),
            str(compiled.registers),
            str(compiled.spilled_bytes),
            f"{compiled.shared_bytes / 1024:.1f}",
            str(programs_at_once(compiled)),
        )
    print_table(console, table, first_numeric=2)


def tables_of(by_capability: Mapping[int, Named]) -> list[FigureTable]:
    """A table for each quantity, with a column for each kind of GPU; no figure where a GPU lacks a kernel."""
    rows = dict.fromkeys(name for kernels in by_capability.values() for name in kernels)
    columns = tuple(Column(f"sm_{capability}", "", 0) for capability in by_capability)
    return [
        FigureTable(
            f"Triton kernels: {what}",
            "kernel",
            columns,
            tuple(
                Row(
                    name,
                    tuple(
                        Figure(figure(kernels[name])) if name in kernels else None for kernels in by_capability.values()
                    ),
                )
                for name in rows
            ),
        )
        for what, figure in _FIGURES.items()
    ]


def run(arguments: argparse.Namespace) -> int:
    """Compile and report. Raises: BenchError."""
    unknown = set(arguments.capabilities) - set(CAPABILITIES)
    if unknown:
        raise BenchError(f"compute capabilities {sorted(unknown)}: there are {', '.join(map(str, CAPABILITIES))}")
    console, by_capability = Console(), {}
    for capability in arguments.capabilities:
        by_capability[capability] = measure(capability, console)
        show(capability, by_capability[capability], console)
    instructions = {
        f"sm_{capability}": sorted({one for compiled in kernels.values() for one in compiled.instructions})
        for capability, kernels in by_capability.items()
    }
    details = {"triton": version("triton"), "instructions": instructions}
    save_figures(arguments, tables_of(by_capability), details)
    return 0
