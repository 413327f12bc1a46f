"""``tools/bench gpu``: how far the engine is from a GPU's own speed, on a model of random weights."""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tools.benchmarks.common.arguments import add_json, count, counts
from tools.benchmarks.common.console import print_table, say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.gpu.bits import measure_bits
from tools.benchmarks.gpu.copies import measure_beside, measure_swaps
from tools.benchmarks.gpu.device import Device
from tools.benchmarks.gpu.gaps import measure_gaps
from tools.benchmarks.gpu.iterations import Measured, Sizes
from tools.benchmarks.gpu.roofline import measure_decodes, measure_prefills
from tools.benchmarks.gpu.shapes import SHAPES
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import machine_line, this_machine
from workers.cuda_version import why_no_cuda

DEVICE_TITLE = "The device's own speed in the same run"
_MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b", help="the model, with random weights")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try the command")
    parser.add_argument("--dtype", default="auto", help="numeric mode of the engine (%(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads, on a CPU (all cores)")
    parser.add_argument("--batches", type=counts, default=(1, 8, 64, 256), metavar="N,N", help="requests of decodes")
    parser.add_argument("--contexts", type=counts, default=(1024, 32768), metavar="N,N", help="tokens before a decode")
    parser.add_argument("--prompts", type=counts, default=(8192,), metavar="N,N", help="tokens of prefills")
    parser.add_argument("--batch", type=count, default=64, help="requests beside copies, and with and without tiles")
    parser.add_argument("--matrix", type=count, default=8192, help="width of the matrices that give the matrix rate")
    parser.add_argument("--copy-mib", type=count, default=512, help="MiB of a copy (%(default)s)")
    parser.add_argument("--kv-mib", type=count, help="MiB of the KV cache (what the device suggests)")
    parser.add_argument("--rounds", type=count, default=10, help="runs of each measurement; medians are shown")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: BenchError."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise BenchError(f"torch finds no CUDA device: {why_no_cuda()}")
    console = Console()
    device = Device(arguments.device)
    machine = this_machine(gpu=device.gpu)
    threads = arguments.threads or machine.cores
    if device.torch.type == "cpu":
        torch.set_num_threads(threads)
    sizes = Sizes(
        max_requests=max(*arguments.batches, arguments.batch),
        max_tokens=max(arguments.prompts),
        kv_bytes=None if arguments.kv_mib is None else arguments.kv_mib * _MIB,
        host_kv_bytes=arguments.copy_mib * _MIB,
    )
    tables: list[FigureTable] = []
    with tempfile.TemporaryDirectory() as folder:
        say(console, f"making {arguments.shape} with random weights")
        copy, rate, own = _own_speed(device, arguments)
        measured = Measured(arguments.shape, Path(folder), device, arguments.dtype, threads, sizes)
        context, rounds = min(arguments.contexts), arguments.rounds
        parts: tuple[Callable[[], FigureTable], ...] = (
            lambda: own,
            lambda: measure_decodes(measured, arguments.batches, arguments.contexts, copy, rounds),
            lambda: measure_prefills(measured, arguments.prompts, rate, rounds),
            lambda: measure_gaps(measured, (1, arguments.batch), context, rounds),
            lambda: measure_swaps(measured, rounds),
            lambda: measure_beside(measured, arguments.batch, context, rounds),
            lambda: measure_bits(measured, arguments.batch, context, rounds),
        )
        where = f"{arguments.shape} with random weights, {measured.mode.name}, on {device.gpu or 'a CPU'}"
        say(console, f"{where}; {machine_line(machine)}")
        for part in parts:
            try:
                table = part()
            except torch.OutOfMemoryError as error:
                say(console, f"left out, because the GPU's memory is too small: {str(error).splitlines()[0]}")
                continue
            tables.append(table)
            _show(table, console)
    details = {"shape": arguments.shape, "dtype": measured.mode.name, "device": str(device.torch)}
    save_figures(arguments, tables, details, machine)
    return 0


def _own_speed(device: Device, arguments: argparse.Namespace) -> tuple[Figure, Figure, FigureTable]:
    """The copies' rate, the products' rate, and both as a table. Before the engine takes the memory."""
    dtype = torch.bfloat16 if device.torch.type == "cuda" else torch.float32
    name = str(dtype).removeprefix("torch.")
    copy = device.copy_bytes_per_s(arguments.copy_mib * _MIB, arguments.rounds)
    rate = device.flops_per_s(arguments.matrix, dtype, arguments.rounds)
    shown = (
        Row("copy of memory, read and written", (_scaled(copy, 1e9),), "GB/s"),
        Row(f"product of two matrices of {arguments.matrix:,}, {name}", (_scaled(rate, 1e12),), "TFLOP/s"),
    )
    return copy, rate, FigureTable(DEVICE_TITLE, "what", (Column("rate"),), shown)


def _scaled(figure: Figure, unit: float) -> Figure:
    assert figure.min is not None
    assert figure.max is not None
    return Figure(figure.median / unit, figure.min / unit, figure.max / unit, figure.rounds)


def _show(table: FigureTable, console: Console) -> None:
    shown = Table(
        table.corner,
        *(f"{column.name}, {column.unit}" if column.unit else column.name for column in table.columns),
        title=table.title,
        title_justify="left",
    )
    for row in table.rows:
        cells = (
            "" if cell is None else f"{cell.median:.{3 if column.decimals is None else column.decimals}f} {row.unit}"
            for cell, column in zip(row.cells, table.columns, strict=True)
        )
        shown.add_row(row.name, *cells)
    print_table(console, shown)
