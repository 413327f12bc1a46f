"""What a person sees of a start: progress bars on a terminal, plain lines elsewhere, on stderr; then how to use it."""

import sys
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from actorserve.processes.status import Phase, Status

_PLAIN_STEP = 0.25  # plain lines repeat a bar's text no more often than this


class ProgressDisplay:
    """One bar (or sparse lines) per thing that takes time. Use it as a context manager around a start."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars: Progress | None = None
        if self._console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[text]}", markup=False),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
        self._tasks: dict[str, TaskID] = {}
        self._printed: dict[str, tuple[str, float]] = {}

    def __enter__(self) -> "ProgressDisplay":
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the bars off the screen; what comes later is ignored."""
        if self._bars is not None:
            self._bars.stop()

    def update(self, name: str, text: str, progress: float | None = None) -> None:
        """Show what ``name`` is doing; ``progress`` lies in 0..1, None where unknown."""
        if self._bars is None:
            last_text, last_progress = self._printed.get(name, ("", 0.0))
            if text != last_text or (progress or 0.0) - last_progress >= _PLAIN_STEP:
                self._printed[name] = (text, progress or 0.0)
                share = "" if progress is None or progress >= 1.0 else f" {progress:.0%}"
                self.line(f"{name}: {text}{share}")
            return
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=None, text="")
        total = None if progress is None else 1.0
        self._bars.update(self._tasks[name], total=total, completed=progress or 0.0, text=text)

    def line(self, text: str) -> None:
        """Print a line for a person."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class StartDisplay:
    """A supervisor's listener for a person at a terminal (``supervisor.Listener``)."""

    def __init__(self, display: ProgressDisplay, usage: str, out: TextIO = sys.stdout) -> None:
        self._display = display
        self._usage = usage
        self._out = out
        self._started = False
        self._added: set[str] = set()  # and not ready yet

    def progress(self, name: str, report: Status) -> None:
        if self._started:
            if report.phase is Phase.READY:
                self._display.line(f"{name} is ready" if name in self._added else f"{name} is ready again")
                self._added.discard(name)
            return
        if report.phase is Phase.READY:
            self._display.update(name, report.text or "ready", 1.0)
        elif report.phase is Phase.LOADING:
            self._display.update(name, report.text, report.progress)

    def all_ready(self) -> None:
        self._started = True
        self._display.close()
        self._out.write(self._usage)
        self._out.flush()

    def restarting(self, name: str, how: str, after_s: float) -> None:
        self._display.line(f"{name} {how}; starting it again in {after_s:.1f} s")

    def adding(self, name: str) -> None:
        self._added.add(name)
        self._display.line(f"starting {name}")

    def removed(self, name: str, why: str) -> None:
        self._added.discard(name)
        self._display.line(why)

    def stopping(self, num_children: int) -> None:
        self._display.close()
        if num_children and self._started:
            self._display.line("stopping: running requests are being finished; Ctrl-C again ends at once")


def usage_text(url: str, model: str) -> str:
    """One ready line, and a curl that streams. JSON in single quotes: paste it into any shell."""
    name = model.replace("\\", "\\\\").replace('"', '\\"').replace("'", "'\\''")
    return (
        f"ready: {model} at {url}\n"
        "\n"
        f"  curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f'    -d \'{{"model": "{name}", "stream": true, '
        '"messages": [{"role": "user", "content": "Tell me a story."}]}\'\n'
    )
