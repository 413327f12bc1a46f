"""``tools/profile fit``: profiles from SplitwiseSim's published measurements of Llama-2-70B and BLOOM-176B.

The file is ``splitwise_perf_model.csv`` (Mutinifni/splitwise-sim, MIT): times of prompts and tokens on DGX machines. It
sweeps prompts at batch 1, batches at 512 prompt tokens, and outputs at 512 prompt tokens, with no cross product. This
fit does not follow SplitwiseSim's own simulator, which counts requests as tokens and ignores the context.

- Prefill: b prompts of n tokens take as long as one prompt of b x n tokens, less the attention between the prompts. The
  time of a length is the geometric mean of its shapes' medians; a time that falls as work grows is evened out.
- Decode: the cost of context is the slope over the sweeps at batch 1, but at least the time to read its KV from memory.
  The remaining time belongs to the batch.
- Chunks, and prompts beside decodes, were not measured. ``core.timing.profile`` derives their times from these.
- Errors are over every measured row. ``left_out``: errors for a length or batch that is predicted from all others.
"""

import argparse
import csv
import math
import statistics
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from actorserve.core.timing.profile import Curve, Link, Profile, not_falling
from actorserve.errors import ProfileError
from actorserve.profile_files import parse_profile, profile_text, save_profile
from tools.profiling.errors import ProfilingError
from tools.profiling.output import prepare_file

Key = TypeVar("Key")
DESCRIPTION = "Make profiles from SplitwiseSim's published measurements (splitwise_perf_model.csv)."
TENSOR_PARALLEL = 8
_COLUMNS = ("model", "hardware", "prompt_size", "batch_size", "token_size", "prompt_time", "token_time")
_COPY_SHARE = 0.8  # share of PCIe's nominal rate that copies from pinned memory reach
_LATENCY_S = 5e-4
_MOST = {
    "tensor_parallel": 4096,
    "prompt_size": 10_000_000,
    "batch_size": 10_000,
    "token_size": 10_000_000,
    "prompt_time": 3.6e6,
    "token_time": 3.6e6,
}  # of each column; times in milliseconds
_NOTABLE_FALL = 0.01


@dataclass(frozen=True, slots=True)
class Model:
    """``kv_width`` is the width of one token's keys in one layer: less than ``width`` if heads share keys."""

    name: str
    parameters: float
    layers: int
    width: int
    kv_width: int

    @property
    def kv_bytes_per_token(self) -> int:
        """The bytes of a token's KV, in float16."""
        return 4 * self.layers * self.kv_width


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates of one GPU, nominal: its memory, PCIe to the host, and its share of the network between machines."""

    name: str
    short: str
    memory_bytes_per_s: float
    pcie_bytes_per_s: float
    network_bytes_per_s: float
    caution: str = ""


MODELS = {
    "llama2-70b": Model("Llama-2-70B", 70e9, 80, 8192, 1024),
    "bloom-176b": Model("BLOOM-176B", 176e9, 70, 14336, 14336),
}
_ASSUMED = (
    "The power cap is an assumption of the measurements' authors, not a measurement: their rows are the uncapped "
    "H100's with 1.3 times the prompt_time and the same token_time."
)
HARDWARE = {
    "a100-80gb": Hardware("NVIDIA A100 80GB", "a100", 2.039e12, 32e9, 25e9),
    "h100-80gb": Hardware("NVIDIA H100 80GB", "h100", 3.35e12, 64e9, 50e9),
    "h100-80gb-pcap": Hardware("NVIDIA H100 80GB, power capped", "h100-capped", 3.35e12, 64e9, 50e9, _ASSUMED),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement; times in seconds."""

    prompt: int
    batch: int
    output: int
    prompt_s: float
    token_s: float

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt * self.batch

    @property
    def num_apart(self) -> float:
        """Pairs of tokens of different prompts."""
        return (self.num_prompt_tokens**2 - self.batch * self.prompt**2) / 2

    @property
    def num_context_tokens(self) -> float:
        """Context tokens that a decode iteration attends to, on average over the output."""
        return self.batch * (self.prompt + self.output / 2)


def read_rows(file: Path) -> dict[tuple[str, str], list[Row]]:
    """The measurements by model and hardware, as the file names them, with the tensor parallelism that is fitted.

    Raises: ProfilingError, in one line that names the row and the column.
    """
    rows: dict[tuple[str, str], list[Row]] = defaultdict(list)
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            reader = csv.DictReader(opened)
            missing = {*_COLUMNS, "tensor_parallel"} - set(reader.fieldnames or ())
            if missing:
                raise ProfilingError(f"{file}: column {min(missing)} is missing")
            for line in reader:
                where = f"{file}: row {reader.line_num}"
                if _positive(line, "tensor_parallel", where) == TENSOR_PARALLEL:
                    row = _row(line, where)
                    rows[line["model"], line["hardware"]].append(row)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ProfilingError(f"cannot read measurements from {file}: {error}") from None
    if not rows:
        raise ProfilingError(f"{file}: no row with tensor_parallel {TENSOR_PARALLEL}")
    return dict(rows)


def _row(line: dict[str, str], where: str) -> Row:
    names = ("prompt_size", "batch_size", "token_size")
    sizes = [_positive(line, name, where) for name in names]
    for name, size in zip(names, sizes, strict=True):
        if size != int(size):
            raise ProfilingError(f"{where}: {name} is {line[name]!r}: expected a whole number")
    times_ms = [_positive(line, name, where) for name in ("prompt_time", "token_time")]
    return Row(*map(int, sizes), *(time_ms / 1e3 for time_ms in times_ms))


def _positive(line: dict[str, str], name: str, where: str) -> float:
    try:
        value = float(line[name])
    except (TypeError, ValueError):
        value = math.nan
    if not 0.0 < value <= _MOST[name]:
        shown = repr(line[name])[:60]
        raise ProfilingError(f"{where}: {name} is {shown}: expected a number above 0, up to {_MOST[name]:g}")
    return value


def fit(model: Model, hardware: Hardware, rows: Sequence[Row]) -> Profile:
    """The profile that these measurements of one model on one machine give, with its errors.

    Raises: ProfilingError, if a sweep has fewer than 3 points, because every inner point is left out once.
    """
    sweeps = {
        "prompt lengths": len({row.num_prompt_tokens for row in rows}),
        "batches": len({row.batch for row in rows}),
        "contexts at batch 1": len({row.num_context_tokens for row in rows if row.batch == 1}),
    }
    for name, count in sweeps.items():
        if count < 3:
            raise ProfilingError(f"{model.name} on {hardware.name}: {count} {name}: expected 3 or more")
    whole = _fit(model, hardware, rows)
    errors = {
        "prompt_time": [_prompt_error(whole, row) for row in rows],
        "token_time": [_token_error(whole, row) for row in rows],
        "prompt_time_left_out": _left_out(model, hardware, rows, lambda row: row.num_prompt_tokens, _prompt_error),
        "token_time_left_out": _left_out(model, hardware, rows, lambda row: row.batch, _token_error),
    }
    stated = [(f"{name}_median", round(statistics.median(values), 4)) for name, values in errors.items()]
    stated += [(f"{name}_max", round(max(values), 4)) for name, values in errors.items()]
    return replace(whole, errors=tuple(sorted(stated)))


def _fit(model: Model, hardware: Hardware, rows: Sequence[Row]) -> Profile:
    context_s, lengths, prompts_s = _prefill(model, rows)
    per_token_s, batches, tokens_s = _decode(model, hardware, rows)
    if min(tokens_s) <= 0.0:
        batch = batches[tokens_s.index(min(tokens_s))]
        raise ProfilingError(
            f"{model.name} on {hardware.name}: token_time of batch_size {batch} is {per_token_s * 1e3:.3g} ms for each "
            "token of context, by the rows of batch_size 1, and nothing else: expected more"
        )
    most = max(row.num_context_tokens for row in rows)
    prefill, decode = _rounded(lengths, not_falling(prompts_s)), _rounded(batches, not_falling(tokens_s))
    return Profile(
        name=f"{model.name} on {TENSOR_PARALLEL} {hardware.name}",
        model=model.name.lower(),
        hardware=f"{TENSOR_PARALLEL} x {hardware.name}",
        dtype="float16",
        prefill=prefill,
        prefill_context_s=float(f"{context_s:.3g}"),
        weights_s=min(_weights_s(model, hardware), prefill.ys[0], decode.ys[0]),
        decode=decode,
        decode_context=_rounded([0.0, most], [0.0, per_token_s * most]),
        swap=Link(_LATENCY_S, TENSOR_PARALLEL * _COPY_SHARE * hardware.pcie_bytes_per_s),
        transfer=Link(_LATENCY_S, TENSOR_PARALLEL * hardware.network_bytes_per_s),
        kv_bytes_per_token=model.kv_bytes_per_token,
        num_layers=model.layers,
        source="splitwise_perf_model.csv of SplitwiseSim (Mutinifni/splitwise-sim, MIT), fitted by tools/profile fit",
    )


def _weights_s(model: Model, hardware: Hardware) -> float:
    """Seconds to read the float16 weights at the memory's nominal rate."""
    return float(f"{2.0 * model.parameters / (TENSOR_PARALLEL * hardware.memory_bytes_per_s):.3g}")


def _prefill(model: Model, rows: Sequence[Row]) -> tuple[float, list[int], list[float]]:
    """Attention's seconds for each pair of tokens; prompt lengths, and the measured time of each."""
    # Attention is assumed to run at the best prompt's rate, with 2 operations for each parameter and token.
    rate = max(2.0 * model.parameters * row.num_prompt_tokens / row.prompt_s for row in rows)
    context_s = 4.0 * model.layers * model.width / rate
    by_shape = _by(rows, lambda row: (row.num_prompt_tokens, row.batch))
    by_length: dict[int, list[float]] = defaultdict(list)
    for (num_tokens, _), each in by_shape.items():
        by_length[num_tokens].append(statistics.median(row.prompt_s + context_s * row.num_apart for row in each))
    lengths = sorted(by_length)
    return context_s, lengths, [statistics.geometric_mean(by_length[length]) for length in lengths]


def _decode(model: Model, hardware: Hardware, rows: Sequence[Row]) -> tuple[float, list[int], list[float]]:
    """Seconds for each token of context; batches, and the measured time of each without its context."""
    alone = [row for row in rows if row.batch == 1]
    contexts = [row.num_context_tokens for row in alone]
    least_s = model.kv_bytes_per_token / (TENSOR_PARALLEL * hardware.memory_bytes_per_s)
    per_token_s = max(least_s, statistics.linear_regression(contexts, [row.token_s for row in alone]).slope)
    by_batch = _by(rows, lambda row: row.batch)
    batches = sorted(by_batch)
    return (
        per_token_s,
        batches,
        [statistics.median(row.token_s - per_token_s * row.num_context_tokens for row in by_batch[n]) for n in batches],
    )


def falls(model: Model, hardware: Hardware, rows: Sequence[Row]) -> list[str]:
    """One line for each kind of shape in which more work took notably less time, which the fit evens out."""
    _, lengths, prompts_s = _prefill(model, rows)
    _, batches, tokens_s = _decode(model, hardware, rows)
    found = []
    for name, sizes, seconds in (("prompt_size x batch_size", lengths, prompts_s), ("batch_size", batches, tokens_s)):
        share, place = max((1.0 - seconds[i + 1] / seconds[i], i) for i in range(len(seconds) - 1))
        if share > _NOTABLE_FALL:
            what = "prompt_time" if seconds is prompts_s else "token_time"
            grown = f"{name} grows from {sizes[place]} to {sizes[place + 1]}"
            found.append(f"{model.name} on {hardware.name}: {what} falls by {share:.0%} where {grown}: evened out")
    return found


def _rounded(xs: Sequence[float], ys: Sequence[float]) -> Curve:
    return Curve(tuple(xs), tuple(float(f"{y:.4g}") for y in ys))


def _by(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    groups: dict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


def _prompt_error(profile: Profile, row: Row) -> float:
    predicted_s = profile.step_s([(row.prompt, 0)] * row.batch, 0, 0)
    return abs(predicted_s - row.prompt_s) / row.prompt_s


def _token_error(profile: Profile, row: Row) -> float:
    predicted_s = profile.decode_s(row.batch, round(row.num_context_tokens))
    return abs(predicted_s - row.token_s) / row.token_s


def _left_out(
    model: Model,
    hardware: Hardware,
    rows: Sequence[Row],
    key: Callable[[Row], int],
    error: Callable[[Profile, Row], float],
) -> list[float]:
    """The errors of rows that are predicted by a fit without them, for each inner value of ``key``."""
    errors: list[float] = []
    for left_out in sorted({key(row) for row in rows})[1:-1]:
        profile = _fit(model, hardware, [row for row in rows if key(row) != left_out])
        errors += [error(profile, row) for row in rows if key(row) == left_out]
    return errors


def heading(profile: Profile, hardware: Hardware, num_rows: int) -> str:
    """The comment at the top of a fitted profile."""
    errors = dict(profile.errors)

    def of(name: str) -> str:
        return f"{errors[f'{name}_median']:.1%} (median) and {errors[f'{name}_max']:.1%} (most)"

    paragraphs = [
        f"{profile.name}, {TENSOR_PARALLEL}-way tensor parallel in one DGX machine. Made by `tools/profile fit CSV`.",
        f"Fitted to {num_rows} measurements that were published with SplitwiseSim. The fit's relative errors: "
        f"prompt_time {of('prompt_time')}, token_time {of('token_time')}; predicting a length from all others "
        f"{of('prompt_time_left_out')}, a batch from all others {of('token_time_left_out')}.",
        "Not measured there, and derived: context_s, from the operations of attention at the rate of the best prompt; "
        f"weights_s, the weights at the memory's {hardware.memory_bytes_per_s / 1e12:g} TB/s; "
        f"swap, {_COPY_SHARE:.0%} of PCIe's {hardware.pcie_bytes_per_s / 1e9:g} GB/s, and transfer, InfiniBand's "
        f"{hardware.network_bytes_per_s / 1e9:g} GB/s, {TENSOR_PARALLEL} of each; their latencies. KV is float16, and "
        "of grouped heads if the model has them.",
        hardware.caution,
    ]
    return "\n\n".join(textwrap.fill(paragraph, 116) for paragraph in paragraphs if paragraph)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("csv", type=Path, metavar="CSV", help="splitwise_perf_model.csv of SplitwiseSim")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("config/profiles"),
        metavar="DIR",
        help="folder for the profiles (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises: ProfilingError."""
    found = read_rows(arguments.csv)
    made = []
    for (model_name, hardware_name), rows in sorted(found.items()):
        if model_name not in MODELS or hardware_name not in HARDWARE:
            raise ProfilingError(f"{arguments.csv}: {model_name} on {hardware_name} is not known here")
        model, hardware = MODELS[model_name], HARDWARE[hardware_name]
        profile = fit(model, hardware, rows)
        file = arguments.output / f"{profile.model}-{hardware.short}.toml"
        try:
            parse_profile(profile_text(profile), file.name)
        except ProfileError as error:
            raise ProfilingError(f"{arguments.csv}: the fit gives no valid profile: {error}") from None
        made.append((model, hardware, rows, profile, file))
    console = Console()
    table = Table("profile", "rows", "prompt_time: median, max", "left out", "token_time: median, max", "left out")
    table.columns[0].no_wrap = True
    for model, hardware, rows, profile, file in made:
        for fall in falls(model, hardware, rows):
            print(f"profile: warning: {fall}", file=sys.stderr)
        try:
            prepare_file(file)
            save_profile(profile, file, heading(profile, hardware, len(rows)))
        except OSError as error:
            raise ProfilingError(f"cannot write {file}: {error.strerror}") from None
        errors = dict(profile.errors)
        names = ("prompt_time", "prompt_time_left_out", "token_time", "token_time_left_out")
        shown = [f"{errors[f'{name}_median']:.1%}, {errors[f'{name}_max']:.1%}" for name in names]
        table.add_row(file.name, str(len(rows)), *shown)
    console.print(table)
    return 0
