"""The supervisor's core: it decides when to start, restart, give up and end children. Pure: time is an argument.

If a child ends before it was ever ready, all children are ended. A child that ends later is restarted with backoff, and
given up when it fails too often (``restarts``). At the end the children are told to end stage by stage. Children of
later stages are still restarted while an earlier stage drains, because that stage needs them to finish its work.

A spare child runs only after a child has asked for a worker. If no spare child is left, or it cannot start, the child
that asked gets a signal. A child that reports that it stopped on purpose becomes a spare child, and one that
reports that it restarts is started again at once.
"""

import signal
from bisect import insort
from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import Final

from actorserve.core.messages import Tick
from actorserve.processes.restarts import GiveUp, Restart, RestartPolicy
from actorserve.processes.status import NO_WORKER, Phase, Status
from actorserve.processes.supervision import (
    Adding,
    AllEnded,
    AllReady,
    ChildEnded,
    ChildReported,
    ChildSpec,
    KillChild,
    Progress,
    Reload,
    Removed,
    Restarting,
    ShutDown,
    SignalChild,
    StartChild,
    Stopping,
    SupervisionTree,
    SupervisorEffect,
    SupervisorEvent,
)

_STOP_GRACE_S: Final = 5.0  # for a process without work to finish


class _Phase(Enum):
    DUE = auto()  # to be started, now or after a backoff
    RUNNING = auto()
    ENDED = auto()  # for good


@dataclass(slots=True)
class _Child:
    """A child over all of its lives. A life is one process of the child.

    ``asker``: for a spare child, the child that asked for it, and the life in which that child asked. A later life of
    the asker does not know of the request.
    """

    spec: ChildSpec
    restarts: RestartPolicy
    asker: "tuple[_Child, int] | None" = None
    phase: _Phase = _Phase.DUE
    start_at: float = -inf
    life: int = 0
    was_ready: bool = False
    is_told_to_end: bool = False  # and is not restarted any more
    stopped_because: str = ""  # the reason that the current life gave for stopping on purpose
    restarts_because: str = ""  # the reason that the current life gave for being started again
    failure: str = ""  # the reason that the current life gave for its failure
    has_reported: bool = False  # in its current life; before that, a SIGHUP would end it
    is_reload_due: bool = False


class SupervisorState:
    """Decides about the children of one host."""

    def __init__(self, tree: SupervisionTree) -> None:
        self._tree = tree
        self._order = {spec.name: number for number, spec in enumerate((*tree.children, *tree.spare))}
        self._children = {spec.name: self._new(spec) for spec in tree.children}
        self._spare = list(tree.spare)
        self._has_been_ready = False
        self._failure: str | None = None
        self._is_stopping = False
        self._is_killing = False
        self._later_stages: list[int] | None = None  # the stages that were not told to end yet; None while no stage was
        self._ending: list[_Child] = []  # the children of the stage that is ending
        self._kill_at = inf
        self._has_ended = False
        self._effects: list[SupervisorEffect] = []

    @property
    def was_killed(self) -> bool:
        """Whether the children were ended without waiting for the work in flight."""
        return self._is_killing

    def handle(self, message: SupervisorEvent, now: float) -> list[SupervisorEffect]:
        match message:
            case ChildReported(name=name, report=report):
                self._on_report(self._children[name], report)
            case ChildEnded(name=name, how=how, ended_well=ended_well):
                self._on_end(self._children[name], how, ended_well, now)
            case ShutDown():
                self._on_shut_down()
            case Reload():
                self._on_reload()
            case Tick():
                pass
        self._start_due(now)
        if self._is_stopping:
            self._end_in_order(now)
        effects, self._effects = self._effects, []
        return effects

    def next_deadline(self) -> float | None:
        starts = [child.start_at for child in self._children.values() if child.phase is _Phase.DUE]
        deadline = min([*starts, self._kill_at])
        return None if deadline == inf else deadline

    def _new(self, spec: ChildSpec, asker: "tuple[_Child, int] | None" = None) -> _Child:
        return _Child(spec, RestartPolicy(self._tree.limits), asker)

    # --- running ---------------------------------------------------------------------------------------------------

    def _start_due(self, now: float) -> None:
        for child in self._children.values():
            if child.phase is _Phase.DUE and now >= child.start_at:
                child.phase = _Phase.RUNNING
                child.life += 1
                child.failure = child.stopped_because = child.restarts_because = ""
                child.has_reported = child.is_reload_due = False
                self._effects.append(StartChild(child.spec))

    def _on_report(self, child: _Child, report: Status) -> None:
        child.has_reported = True
        if child.is_reload_due:
            child.is_reload_due = False
            self._effects.append(SignalChild(child.spec.name, signal.SIGHUP))
        match report.phase:
            case Phase.FAILED:
                child.failure = report.text
            case Phase.STOPPED:
                child.stopped_because = report.text or "it was told to"
            case Phase.RESTARTS:
                child.restarts_because = report.text or "it was told to"
            case Phase.READY:
                child.was_ready = True
            case Phase.WANTS_WORKER:
                self._add_spare(child)
                return
        self._effects.append(Progress(child.spec.name, report))
        are_ready = all(child.was_ready or child.asker is not None for child in self._children.values())
        if are_ready and not self._has_been_ready and not self._is_stopping:
            self._has_been_ready = True
            self._effects.append(AllReady())

    def _on_end(self, child: _Child, how: str, ended_well: bool, now: float) -> None:
        name = child.spec.name
        child.phase = _Phase.ENDED
        if child.is_told_to_end and (ended_well or child.spec.stop_stage > 0 or self._is_killing):
            return
        if ended_well and child.stopped_because:
            self._remove(child, f"{name} has stopped: {child.stopped_because}")
        elif ended_well and child.restarts_because and not child.is_told_to_end:
            child.phase, child.start_at = _Phase.DUE, now
            self._effects.append(Restarting(name, f"has ended: {child.restarts_because}", 0.0))
        elif not child.was_ready:
            self._give_up(child, f"{name} could not start: {child.failure or f'it {how}'}")
        elif child.is_told_to_end:
            self._fail(f"{name}: {child.failure or f'it {how} before it had finished'}")
        else:
            how = f"failed: {child.failure}" if child.failure else how
            match child.restarts.failed(now):
                case GiveUp(num_failures=times):
                    window_s = self._tree.limits.window_s
                    self._give_up(child, f"{name} {how}; that was failure {times} in {window_s:g} s")
                case Restart(after_s=after_s):
                    child.phase, child.start_at = _Phase.DUE, now + after_s
                    self._effects.append(Restarting(name, how, after_s))

    def _give_up(self, child: _Child, why: str) -> None:
        if child.asker is None:
            self._fail(why)
            return
        self._remove(child, why)
        if not child.was_ready:
            self._tell_no_worker(*child.asker)

    def _fail(self, why: str) -> None:
        if self._failure is None:
            self._failure = why
        self._is_stopping = True

    def _on_reload(self) -> None:
        for child in self._children.values():
            if child.phase is _Phase.RUNNING:
                if child.has_reported:
                    self._effects.append(SignalChild(child.spec.name, signal.SIGHUP))
                else:
                    child.is_reload_due = True

    # --- spare children --------------------------------------------------------------------------------------------

    def _add_spare(self, asker: _Child) -> None:
        if not self._spare or self._is_stopping:
            self._tell_no_worker(asker, asker.life)
            return
        child = self._new(self._spare.pop(0), (asker, asker.life))
        self._children[child.spec.name] = child
        self._effects.append(Adding(child.spec.name))

    def _tell_no_worker(self, asker: _Child, life: int) -> None:
        # A later life of the asker did not ask, and may not handle the signal yet. An ending process may no longer do
        # so.
        if asker.life == life and asker.phase is _Phase.RUNNING and not self._is_stopping:
            self._effects.append(SignalChild(asker.spec.name, NO_WORKER))

    def _remove(self, child: _Child, why: str) -> None:
        del self._children[child.spec.name]
        insort(self._spare, child.spec, key=lambda spec: self._order[spec.name])
        self._effects.append(Removed(child.spec.name, why))

    # --- ending ----------------------------------------------------------------------------------------------------

    def _on_shut_down(self) -> None:
        if self._is_stopping:
            self._is_killing = True
            for child in self._children.values():
                self._tell_to_end(child)
        self._is_stopping = True

    def _tell_to_end(self, child: _Child) -> None:
        child.is_told_to_end = True
        if child.phase is _Phase.DUE:
            child.phase = _Phase.ENDED

    def _end_in_order(self, now: float) -> None:
        """End the stages one after another with SIGTERM. When a stage's time is over, kill its children."""
        if self._later_stages is None:
            children = self._children.values()
            self._later_stages = sorted({child.spec.stop_stage for child in children})
            self._effects.append(Stopping(sum(child.phase is not _Phase.ENDED for child in children)))
        while not any(child.phase is not _Phase.ENDED for child in self._ending) and not self._has_ended:
            self._kill_at = inf
            if self._later_stages:
                self._end_stage(self._later_stages.pop(0), now)
            else:
                self._has_ended = True
                self._effects.append(AllEnded(self._failure))
        if self._kill_at < inf and (self._is_killing or now >= self._kill_at):
            self._kill_at = inf
            self._effects += [KillChild(child.spec.name) for child in self._ending if child.phase is _Phase.RUNNING]

    def _end_stage(self, stage: int, now: float) -> None:
        self._ending = [child for child in self._children.values() if child.spec.stop_stage == stage]
        for child in self._ending:
            self._tell_to_end(child)
            if child.phase is _Phase.RUNNING:
                self._effects.append(SignalChild(child.spec.name, signal.SIGTERM))
        drains = stage < self._tree.num_draining_stages
        self._kill_at = now + _STOP_GRACE_S + (self._tree.drain_timeout_s if drains else 0.0)
