"""A supervised server as one unit of systemd: its children's starts and ends are the unit's."""

from collections.abc import Callable

from actorserve.processes.status import Phase, Reporter, Status
from actorserve.processes.supervision import Adding, AllReady, News, Progress, Removed, Restarting, Stopping


class UnitNews:
    """Passes the supervisor's news to a person's ``display`` and to systemd (``actors.supervisor.Listener``).

    The children may take ``end_within_s`` to end.
    """

    def __init__(self, show: Callable[[News], None], reporter: Reporter, end_within_s: float) -> None:
        self._show = show
        self._reporter = reporter
        self._end_within_s = end_within_s

    def show(self, news: News) -> None:
        self._show(news)
        match news:
            case Progress(name=name, report=Status(phase=Phase.LOADING) as report):
                self._reporter.loading(f"{name}: {report.text}", report.progress)
            case Progress(name=name, report=Status(phase=Phase.READY)):
                self._reporter.say(f"{name} is ready")
            case AllReady():
                self._reporter.ready()
            case Restarting(name=name, how=how):
                self._reporter.say(f"{name} {how}; it is being started again")
            case Adding(name=name):
                self._reporter.say(f"starting {name}")
            case Removed(why=why):
                self._reporter.say(why)
            case Stopping():
                self._reporter.stopping(self._end_within_s)
