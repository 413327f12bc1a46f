"""What a person sees on stderr while the server starts and runs: progress bars on a terminal, plain lines elsewhere."""

import sys
from typing import TextIO

from rich import progress as bars
from rich.console import Console

from actorserve.processes.status import Phase, Status
from actorserve.processes.supervision import Adding, AllReady, News, Progress, Removed, Restarting, Stopping

_PLAIN_STEP = 0.25  # a plain line is repeated when the progress has grown by this


class ProgressDisplay:
    """One bar (or a few plain lines) per process or download. Use it as a context manager around a start."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars: bars.Progress | None = None
        if self._console.is_terminal:
            self._bars = bars.Progress(
                bars.TextColumn("{task.description}"),
                bars.BarColumn(bar_width=24),
                bars.TextColumn("{task.fields[text]}", markup=False),
                bars.TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
        self._tasks: dict[str, bars.TaskID] = {}
        self._printed: dict[str, tuple[str, float]] = {}

    def __enter__(self) -> "ProgressDisplay":
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bars. Later updates have no effect on the screen."""
        if self._bars is not None:
            self._bars.stop()

    def update(self, name: str, text: str, progress: float | None = None) -> None:
        """Show what ``name`` is doing. ``progress`` lies in 0..1; None: unknown."""
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
    """Shows the supervisor's news to a person (``actors.supervisor.Listener``); ``usage`` goes to ``out`` when the
    server is ready.
    """

    def __init__(self, display: ProgressDisplay, usage: str, out: TextIO = sys.stdout) -> None:
        self._display = display
        self._usage = usage
        self._out = out
        self._started = False
        self._added: set[str] = set()  # names of children that were added and are not ready yet

    def show(self, news: News) -> None:
        match news:
            case Progress(name=name, report=report):
                self._show_progress(name, report)
            case AllReady():
                self._started = True
                self._display.close()
                self._out.write(self._usage)
                self._out.flush()
            case Restarting(name=name, how=how, after_s=after_s):
                self._display.line(f"{name} {how}; starting it again in {after_s:.1f} s")
            case Adding(name=name):
                self._added.add(name)
                self._display.line(f"starting {name}")
            case Removed(name=name, why=why):
                self._added.discard(name)
                self._display.line(why)
            case Stopping(num_children=num_children):
                self._display.close()
                if num_children and self._started:
                    self._display.line("stopping: running requests are being finished; Ctrl-C again ends at once")

    def _show_progress(self, name: str, report: Status) -> None:
        if self._started:
            if report.phase is Phase.READY:
                self._display.line(f"{name} is ready" if name in self._added else f"{name} is ready again")
                self._added.discard(name)
        elif report.phase is Phase.READY:
            self._display.update(name, report.text or "ready", 1.0)
        elif report.phase is Phase.LOADING:
            self._display.update(name, report.text, report.progress)


def usage_text(url: str, model: str) -> str:
    """One ready line, and a curl command that streams. Its JSON is in single quotes, so any shell takes it."""
    name = model.replace("\\", "\\\\").replace('"', '\\"').replace("'", "'\\''")
    return (
        f"ready: {model} at {url}\n"
        "\n"
        f"  curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f'    -d \'{{"model": "{name}", "stream": true, '
        '"messages": [{"role": "user", "content": "Tell me a story."}]}\'\n'
    )
