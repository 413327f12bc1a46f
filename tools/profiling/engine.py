"""``tools/profile``: measures the engine that a worker would have, shows a table, and writes a profile for workers."""

import argparse
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from actorserve.core.timing.profile import Link, Profile
from actorserve.model_files.locate import locate
from actorserve.processes.child import Child
from actorserve.processes.launch import LaunchError, resolve_workers
from actorserve.processes.status import Reporter
from actorserve.profile_files import MAX_DRIFT, save_profile
from actorserve.settings import Settings, load_settings
from tools.profiling.caps import measure_caps, open_gpu
from tools.profiling.errors import ProfilingError
from tools.profiling.output import prepare_file
from workers.profile.engine_timer import Shape
from workers.profile.fit import make_profile, measured_shapes, profile_s
from workers.profile.measure import QUICK, THOROUGH, Measurements, Timing, measure
from workers.profile.plans import quick_plan, thorough_plan

_HOST_KV_BYTES = 256 * 2**20  # host memory to measure copies with
_LONGEST_ITERATION = 2048  # tokens
PAUSES = (
    "The pauses between iterations are 0 in this profile, because only a worker makes them: "
    "tools/profile --from-journal fits them to a worker's journal."
)
_TIMES = ("ms", "spread", "profile says")


def run(arguments: argparse.Namespace) -> int:
    """Measure, show and write. Raises: ProfilingError, ActorserveError."""
    _interrupt_at_signals()
    console = Console()
    if arguments.output is not None:
        _prepare(arguments.output)
    settings = _settings(arguments)
    gpu = open_gpu(settings.workers.device) if arguments.caps else None
    # The numeric libraries read this variable when they load.
    os.environ["OMP_NUM_THREADS"] = str(settings.workers.threads)
    from workers.engines.make_engine import load_engine
    from workers.profile.worker_profile import describe_profile, facts_of, kv_bytes_per_token, profile_file

    with console.status("loading the model"):
        engine = load_engine(Child("profile", settings, Path(), Reporter(None)))
    facts = facts_of(settings)
    file = arguments.output or profile_file(engine, facts)
    _prepare(file)
    limits = settings.workers.batch_limits()
    plan = (quick_plan if arguments.quick else thorough_plan)(engine, limits.tokens, limits.requests)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("measuring", total=1.0)
        found = measure(
            engine,
            plan,
            QUICK if arguments.quick else THOROUGH,
            lambda share, what: bar.update(task, completed=share, description=what or "done"),
        )
    name = describe_profile(engine, facts)
    profile = make_profile(name, engine.model.name, facts, kv_bytes_per_token(engine), found)
    profile = replace(profile, num_layers=engine.kv.num_layers)
    if gpu is not None:
        with console.status("measuring under power caps"):
            caps = measure_caps(
                engine, *gpu, facts.hardware, min(limits.tokens, engine.model.max_tokens), limits.requests
            )
        profile = replace(profile, caps=caps)
    show(profile, found, console)
    try:
        heading = f"Measured {'quickly ' if arguments.quick else ''}by tools/profile."
        save_profile(profile, file, heading, measured_shapes(found))
    except OSError as error:
        raise ProfilingError(f"cannot write {file}: {error}") from None
    console.print(f"written to {file}", markup=False, highlight=False, soft_wrap=True)
    console.print(PAUSES, markup=False, highlight=False, soft_wrap=True)
    return 0


def _interrupt_at_signals() -> None:
    """SIGTERM and the terminal's end interrupt like Ctrl-C. Only the first of these signals does, because a closing
    terminal sends several, and the next one could interrupt the sweep of power caps while it puts the limit back.
    A signal that is ignored already, as by nohup, stays ignored.
    """
    candidates = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    numbers = [number for number in candidates if signal.getsignal(number) is not signal.SIG_IGN]

    def interrupt(_: int, frame: FrameType | None) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in numbers:
        signal.signal(number, interrupt)


def _prepare(file: Path) -> None:
    try:
        prepare_file(file)
    except OSError as error:
        raise ProfilingError(f"cannot write {file}: {error.strerror}") from None


def _settings(arguments: argparse.Namespace) -> Settings:
    """The options of a worker, except for sizes that only the measurement needs."""
    workers: dict[str, Any] = {"device": arguments.device, "threads": arguments.threads}
    if not arguments.quick:
        workers["max_batch_tokens"] = _LONGEST_ITERATION
    path = locate(arguments.model, load_format=arguments.load_format)
    model = {"load_format": arguments.load_format, "dtype": arguments.dtype, "path": str(path)}
    settings = load_settings(None, {"model": model, "workers": workers})
    try:
        resolved, placement = resolve_workers(settings)
    except LaunchError as error:
        raise ProfilingError(str(error)) from None
    if placement.selectors:
        os.environ["CUDA_VISIBLE_DEVICES"] = placement.selectors[0]
    mine = {"memory_bytes": None, "host_kv_bytes": _HOST_KV_BYTES, "swap": "proactive"}
    return resolved.model_copy(update={"workers": resolved.workers.model_copy(update=mine)})


def show(profile: Profile, found: Measurements, console: Console) -> None:
    """A table of the measured times and the profile's predictions."""
    console.print(profile.name, markup=False, highlight=False, soft_wrap=True)
    table = _table("prefill: tokens", "after", *_TIMES, "tokens/s")
    for shape, timing in found.fitted.items():
        if not shape.num_requests:
            cells = (str(shape.num_tokens), str(shape.num_before), *_times(profile, shape, timing))
            table.add_row(*cells, f"{shape.num_tokens / timing.seconds:,.0f}")
    console.print(table)
    table = _table("decode: requests", "after each", *_TIMES, "tokens/s")
    for shape, timing in found.fitted.items():
        if not shape.num_tokens:
            cells = (str(shape.num_requests), str(shape.num_context_tokens), *_times(profile, shape, timing))
            table.add_row(*cells, f"{shape.num_requests / timing.seconds:,.0f}")
    console.print(table)
    table = _table("both: tokens", "after", "requests", "after each", *_TIMES)
    for shape, timing in (found.fitted | found.compared).items():
        if shape.num_tokens and shape.num_requests:
            table.add_row(*map(str, shape), *_times(profile, shape, timing))
    console.print(table)
    for name, link in (("swap", profile.swap), ("transfer", profile.transfer)):
        console.print(f"{name}: {_link(link)}", highlight=False)
    for name, error in profile.errors:
        if name != "drift":
            console.print(
                f"{name}: {error:.1%} off, for iterations that the profile was not fitted to", highlight=False
            )
    console.print(f"drift: the machine's speed changed by {found.drift:.1%} during the measurement", highlight=False)
    if found.drift > MAX_DRIFT:
        console.print("Benchmarks refuse this profile. Measure again when the machine has no other work.")


def _table(*columns: str) -> Table:
    table = Table(*columns)
    for column in table.columns:
        column.justify = "right"
    return table


def _times(profile: Profile, shape: Shape, timing: Timing) -> tuple[str, str, str]:
    predicted_s = profile_s(profile, shape)
    return f"{timing.seconds * 1e3:.2f}", f"{timing.spread:.1%}", f"{predicted_s * 1e3:.2f}"


def _link(link: Link) -> str:
    return f"{link.bytes_per_s / 1e9:.2f} GB/s, {link.latency_s * 1e6:.0f} us a copy"
