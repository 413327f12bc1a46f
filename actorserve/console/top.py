"""``top``: the workers live. Only rows that fit on the screen are drawn, so a thousand workers cost what fifty do."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from actorserve.console.outcome import Exit, as_objects
from actorserve.console.session import Session
from actorserve.console.tables import in_bytes, plain
from actorserve.core.messages import Answer

Row = dict[str, Any]
_BAR: Final = 10
_COUNTS: Final = ("running", "waiting", "swapped", "migrating", "migrated", "prompt_tokens_left", "preemptions")
_HEADER: Final = (
    *("worker", "state", "KV", "freeness", "run", "wait", "swapped", "moving", "moved", "prompt left", "preempted"),
    *("tokens/s", "W", "cap"),
)
_NUM_LEFT: Final = 3  # the columns that are set to the left; the last of them has the bar
_OTHER_LINES: Final = 4  # of the screen: the summary, the header, and a line at the end
_SAME_REPORT_S: Final = 0.02  # the times of two reports differ by more
_RATE_GAIN: Final = 0.5  # weight of the newest rate; reports come in steps


class TokenRates:
    """Tokens per second of each worker, from the counts of successive tables."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, int]] = {}  # when a worker had generated how many tokens
        self._rates: dict[str, float] = {}  # of the workers that have reported twice

    def update(self, rows: Sequence[Row], now: float) -> Mapping[str, float]:
        """The rates by worker, now that these rows have come. A worker that is new, or has restarted, has rate 0."""
        last, rates = self._last, self._rates
        self._last, self._rates = {}, {}
        for row in rows:
            name, count = row["worker"], row["output_tokens"]
            at = now - (row["age_s"] or 0.0)
            before, count_before = last.get(name, (at, count))
            if count < count_before:
                before, count_before = at, count
            elif at - before > _SAME_REPORT_S:
                rate = (count - count_before) / (at - before)
                known = rates.get(name, rate)
                self._rates[name] = known + _RATE_GAIN * (rate - known)
                before, count_before = at, count
            elif name in rates:
                self._rates[name] = rates[name]
            self._last[name] = before, count_before
        return {row["worker"]: self._rates.get(row["worker"], 0.0) for row in rows}


def watch(session: Session, console: Console, interval_s: float, sort: str) -> Exit:
    """Draw the workers until Ctrl-C, or until the server does not answer."""
    rates = TokenRates()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                began_s = time.monotonic()
                answer = session.read("top")
                if answer is None:
                    break
                live.update(picture(answer, rates, time.monotonic(), console.height, sort), refresh=True)
                time.sleep(max(0.0, began_s + interval_s - time.monotonic()))
        except KeyboardInterrupt:
            return Exit.DONE
    console.print(f"no answer from {session.asker.address} in {session.timeout_s:g} s", markup=False)
    return Exit.TIMEOUT


def picture(answer: Answer, rates: TokenRates, now: float, height: int, sort: str) -> Text:
    """One screen: a line of sums, and as many workers as fit below it, in the order of a column.

    The columns are set here, because a table of the library takes ten times as long to draw.
    """
    rows = as_objects(answer)
    by_worker = rates.update(rows, now)
    for row in rows:
        row["tokens_per_s"] = by_worker[row["worker"]]
    rows.sort(key=lambda row: _key(row, sort))
    shown = rows[: max(1, height - _OTHER_LINES)]
    texts = [_HEADER, *map(_cells, shown)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    screen = Text(_summary(rows), style="", no_wrap=True, overflow="crop")
    screen.stylize("bold")
    for number, cells in enumerate(texts):
        padded = [
            text.ljust(width) if index < _NUM_LEFT else text.rjust(width)
            for index, (text, width) in enumerate(zip(cells, widths, strict=True))
        ]
        line = "  ".join(padded)
        screen.append("\n" if number else "\n\n")
        if number == 0:
            screen.append(line, style="bold")
            continue
        share, at = _share(shown[number - 1]), sum(widths[: _NUM_LEFT - 1]) + 2 * (_NUM_LEFT - 1)
        screen.append(line[:at])
        screen.append(line[at : at + _BAR], style="red" if share > 0.9 else "yellow" if share > 0.7 else "green")
        screen.append(line[at + _BAR :])
    return screen


def _share(row: Row) -> float:
    """The part of its KV memory that is used."""
    used, room = int(row["kv_used_bytes"]), int(row["kv_total_bytes"])
    return used / max(1, room)


def _cells(row: Row) -> tuple[str, ...]:
    share = _share(row)
    filled = round(share * _BAR)
    return (
        plain(row["worker"]),
        plain(row["state"]),
        "█" * filled + "░" * (_BAR - filled) + f" {share:4.0%}",
        "-" if row["freeness"] is None else f"{row['freeness']:.0f}",
        *(str(row[name]) for name in _COUNTS),
        f"{row['tokens_per_s']:.0f}",
        *("-" if row.get(name) is None else f"{row[name]:.0f}" for name in ("watts", "cap_watts")),
    )


def _summary(rows: Sequence[Row]) -> str:
    def total(name: str) -> Any:
        return sum(row[name] for row in rows)

    used, room = total("kv_used_bytes"), total("kv_total_bytes")
    return (
        f"{len(rows)} workers   {total('running')} running   {total('waiting')} waiting   "
        f"{total('migrating')} moving   KV {in_bytes(used)} of {in_bytes(room)}   {total('tokens_per_s'):.0f} tokens/s"
    )


def _key(row: Row, sort: str) -> tuple[Any, ...]:
    """Names from A to Z, and numbers from the largest; unknown ones last."""
    value = row.get(sort, row["worker"])
    if isinstance(value, str):
        return 0, value
    return (1, 0.0, row["worker"]) if value is None else (0, -value, row["worker"])
