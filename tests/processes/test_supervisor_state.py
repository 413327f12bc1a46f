"""The supervisor's core under a virtual clock: starts, restarts, spare children, and the order of the end."""

import signal

from hypothesis import given, settings, strategies as st

from actorserve.core.messages import Tick
from actorserve.processes.status import NO_WORKER, Phase, Status
from actorserve.processes.supervision import (
    Adding,
    AllEnded,
    AllReady,
    ChildEnded,
    ChildReported,
    KillChild,
    Progress,
    Removed,
    Restarting,
    ShutDown,
    SignalChild,
    StartChild,
    Stopping,
    SupervisorEffect,
)
from actorserve.processes.supervisor_state import SupervisorState
from tests.processes.trees import READY, TREE, W1, C, G, W

ASKS = Status(Phase.WANTS_WORKER)


def begun() -> SupervisorState:
    """A supervisor's core whose children all run and are ready."""
    state = SupervisorState(TREE)
    state.handle(Tick(), 0.0)
    for spec in TREE.children:
        state.handle(ChildReported(spec.name, READY), 0.0)
    return state


def killed(name: str) -> ChildEnded:
    return ChildEnded(name, "was killed by SIGKILL", False)


def ended(name: str) -> ChildEnded:
    return ChildEnded(name, "ended with exit status 0", True)


def test_all_children_start_at_once() -> None:
    """The core starts all children at once, in the tree's order, and then has no deadline."""
    state = SupervisorState(TREE)
    assert state.next_deadline() is not None
    assert state.handle(Tick(), 0.0) == [StartChild(C), StartChild(G), StartChild(W)]
    assert state.next_deadline() is None


def test_ready_is_said_once() -> None:
    """AllReady comes when the last child has become ready, and never again."""
    state = begun()
    assert state.handle(ChildReported("w", READY), 1.0) == [Progress("w", READY)]
    state = SupervisorState(TREE)
    state.handle(Tick(), 0.0)
    state.handle(ChildReported("c", READY), 0.0)
    state.handle(ChildReported("g", READY), 0.0)
    assert state.handle(ChildReported("w", READY), 0.0) == [Progress("w", READY), AllReady()]


def test_a_child_that_fails_is_restarted_after_the_backoff() -> None:
    """The restart comes at the end of the backoff, which doubles up to its bound."""
    state = begun()
    assert state.handle(killed("w"), 10.0) == [Restarting("w", "was killed by SIGKILL", 1.0)]
    assert state.next_deadline() == 11.0
    assert state.handle(Tick(), 10.9) == []
    assert state.handle(Tick(), 11.0) == [StartChild(W)]
    assert state.handle(killed("w"), 11.5) == [Restarting("w", "was killed by SIGKILL", 1.5)]


def test_a_child_that_keeps_failing_ends_all() -> None:
    """The failure that exceeds the limit stops the others stage by stage, and is reported at the end."""
    state = begun()
    for now in (10.0, 20.0):
        state.handle(killed("w"), now)
        state.handle(Tick(), now + 5.0)
    assert state.handle(killed("w"), 30.0) == [Stopping(2), SignalChild("g", signal.SIGTERM)]
    assert state.handle(ended("g"), 31.0) == [SignalChild("c", signal.SIGTERM)]
    why = "w was killed by SIGKILL; that was failure 3 in 60 s"
    assert state.handle(ended("c"), 32.0) == [AllEnded(why)]
    assert state.next_deadline() is None


def test_a_stage_that_does_not_end_is_killed() -> None:
    """Stage 0 has the drain's time and a grace period, later stages only the grace period; then they are killed."""
    state = begun()
    assert state.handle(ShutDown(), 100.0) == [Stopping(3), SignalChild("g", signal.SIGTERM)]
    assert state.next_deadline() == 135.0
    assert state.handle(Tick(), 135.0) == [KillChild("g")]
    assert state.next_deadline() is None
    assert state.handle(killed("g"), 135.1) == [SignalChild(name, signal.SIGTERM) for name in ("c", "w")]
    assert state.handle(ended("c"), 136.0) == []
    assert state.next_deadline() == 140.1
    assert state.handle(Tick(), 140.1) == [KillChild("w")]
    why = "g: it was killed by SIGKILL before it had finished"
    assert state.handle(killed("w"), 140.2) == [AllEnded(why)]


def test_a_second_shut_down_kills_stage_after_stage() -> None:
    """A second ShutDown kills every stage at once, restarts no child, and reports no failed drain."""
    state = begun()
    state.handle(ShutDown(), 100.0)
    assert state.handle(killed("w"), 100.5) == [Restarting("w", "was killed by SIGKILL", 1.0)]
    assert not state.was_killed
    assert state.handle(ShutDown(), 101.0) == [KillChild("g")]
    assert state.was_killed
    assert state.handle(killed("g"), 101.1) == [SignalChild("c", signal.SIGTERM), KillChild("c")]
    assert state.handle(killed("c"), 101.2) == [AllEnded(None)]


def test_a_child_that_fails_during_the_drain_is_restarted_until_its_own_stage_ends() -> None:
    """Stage 0 may need the child. Once the child's own stage is told to end, it is not started again."""
    state = begun()
    state.handle(ShutDown(), 100.0)
    state.handle(killed("w"), 100.5)
    assert state.handle(Tick(), 101.5) == [StartChild(W)]
    state.handle(killed("w"), 102.0)
    assert state.handle(ended("g"), 102.5) == [SignalChild("c", signal.SIGTERM)]
    assert state.handle(ended("c"), 103.0) == [AllEnded(None)]


def test_only_the_life_that_asked_is_told_of_a_failed_spare_child() -> None:
    """The child that asked gets a signal; a later life of it has not asked, and gets none."""
    state = begun()
    assert state.handle(ChildReported("c", ASKS), 1.0) == [Adding("w1"), StartChild(W1)]
    removed = Removed("w1", "w1 could not start: it was killed by SIGKILL")
    assert state.handle(killed("w1"), 2.0) == [removed, SignalChild("c", NO_WORKER)]
    state.handle(ChildReported("c", ASKS), 3.0)
    state.handle(killed("c"), 4.0)
    state.handle(Tick(), 5.0)
    assert state.handle(killed("w1"), 6.0) == [removed]


def test_without_spare_children_the_asker_is_told() -> None:
    """A second request finds no spare child, and adds nothing."""
    state = begun()
    state.handle(ChildReported("c", ASKS), 1.0)
    assert state.handle(ChildReported("c", ASKS), 1.0) == [SignalChild("c", NO_WORKER)]


def test_a_child_that_stopped_on_purpose_is_the_next_spare_child() -> None:
    """The child is not restarted, the others go on, and it comes before spare children with higher numbers."""
    state = begun()
    state.handle(ChildReported("w", Status(Phase.STOPPED, "not needed")), 1.0)
    assert state.handle(ended("w"), 1.0) == [Removed("w", "w has stopped: not needed")]
    assert state.handle(ChildReported("c", ASKS), 2.0) == [Adding("w"), StartChild(W)]


def test_a_child_that_restarts_on_purpose_is_started_again_at_once() -> None:
    """It is no failure, however often it happens; a child that was killed instead counts as failed."""
    state = begun()
    for now in range(1, 20):
        state.handle(ChildReported("w", Status(Phase.RESTARTS, "an operator restarts it")), float(now))
        why = "has ended: an operator restarts it"
        assert state.handle(ended("w"), float(now)) == [Restarting("w", why, 0.0), StartChild(W)]
        state.handle(ChildReported("w", READY), float(now))
    state.handle(ChildReported("w", Status(Phase.RESTARTS, "an operator restarts it")), 30.0)
    (restarting,) = state.handle(killed("w"), 30.0)
    assert isinstance(restarting, Restarting)
    assert restarting.after_s > 0.0


_EVENTS = st.one_of(
    st.tuples(st.just("report"), st.sampled_from(["c", "g", "w", "w1"]), st.sampled_from([READY, ASKS])),
    st.tuples(st.just("end"), st.sampled_from(["c", "g", "w", "w1"]), st.booleans()),
    st.tuples(st.just("wait"), st.just(""), st.floats(0.0, 80.0)),
    st.tuples(st.just("shut down"), st.just(""), st.none()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(_EVENTS, max_size=40))
def test_whatever_happens_all_processes_end(events: list[tuple[str, str, object]]) -> None:
    """No child runs twice at once, only running children get signals, and a second ShutDown ends all processes."""
    state = SupervisorState(TREE)
    running: set[str] = set()
    now = 0.0
    num_ended = 0

    def check(effects: list[SupervisorEffect]) -> None:
        nonlocal num_ended
        for effect in effects:
            match effect:
                case StartChild(spec=spec):
                    assert spec.name not in running
                    running.add(spec.name)
                case SignalChild(name=name) | KillChild(name=name):
                    assert name in running
                case AllEnded():
                    assert not running
                    num_ended += 1

    check(state.handle(Tick(), now))
    for kind, name, value in events:
        if num_ended:
            break
        match kind, value:
            case "report", Status() if name in running:
                check(state.handle(ChildReported(name, value), now))
            case "end", bool() if name in running:
                running.remove(name)
                check(state.handle(ended(name) if value else killed(name), now))
            case "wait", float():
                now += value
                check(state.handle(Tick(), now))
            case "shut down", _:
                check(state.handle(ShutDown(), now))
    for _ in range(2):
        check(state.handle(ShutDown(), now) if not num_ended else [])
    while running:
        name = min(running)
        running.remove(name)
        check(state.handle(killed(name), now))
    assert num_ended == 1
