"""The death watch: silence, incarnations, goodbyes, and our own pauses."""

import pytest

from actorserve.actors.death_watch import DeathWatch, Standing, Verdict, WatchTimes
from actorserve.core.messages import Peer

_TIMES = WatchTimes(heartbeat_s=0.25, death_after_s=2.0)
_A, _B = Peer("a", 5), Peer("b", 5)


def _run(watch: DeathWatch, until: float) -> list[tuple[float, Verdict]]:
    """Tick at every deadline up to ``until``."""
    verdicts = []
    while (deadline := watch.next_deadline()) is not None and deadline <= until:
        verdicts.append((deadline, watch.tick(deadline)))
    return verdicts


def test_nobody_is_watched_at_first() -> None:
    """Without peers there is no deadline, and a tick finds nothing."""
    watch = DeathWatch(_TIMES)
    assert watch.next_deadline() is None
    assert watch.tick(100.0) == Verdict()
    assert watch.standing(_A) is Standing.UNKNOWN
    assert not watch.heard(_A, 0.0)


def test_heartbeats_are_due_regularly() -> None:
    """Everybody alive is due a heartbeat every ``heartbeat_s``."""
    watch = DeathWatch(_TIMES)
    watch.meet(_A, 0.0)
    watch.meet(_B, 0.1)
    assert [(at, v.heartbeats_due) for at, v in _run(watch, 0.5)] == [(0.25, (_A, _B)), (0.5, (_A, _B))]


def test_silence_is_suspect_and_then_death() -> None:
    """A silent peer is suspected after 0.625 s and dead at 2 s; one that is heard stays alive."""
    watch = DeathWatch(_TIMES)
    watch.meet(_A, 0.0)
    watch.meet(_B, 0.0)
    suspected, died = [], []
    for at in [0.25 * i for i in range(1, 13)]:
        assert watch.heard(_B, at)
        verdict = watch.tick(at)
        suspected += [at] * (_A in verdict.suspects)
        died += [(at, peer) for peer in verdict.dead]
        assert _B not in verdict.suspects
    assert suspected[0] == 0.75
    assert died == [(2.0, _A)]
    assert watch.alive == (_B,)
    assert watch.standing(_A) is Standing.SILENT
    assert not watch.heard(_A, 3.0)


def test_a_newer_incarnation_ends_the_old_at_once() -> None:
    """Meeting a newer incarnation replaces the older one, which never comes back."""
    watch = DeathWatch(_TIMES)
    assert watch.meet(_A, 0.0) is None
    newer = Peer("a", 6)
    assert watch.meet(newer, 0.1) == _A
    assert watch.alive == (newer,)
    assert watch.standing(_A) is Standing.SILENT
    assert not watch.heard(_A, 0.2)
    assert watch.standing(newer) is Standing.ALIVE
    with pytest.raises(ValueError, match="known"):
        watch.meet(_A, 0.2)


def test_an_older_incarnation_is_never_met() -> None:
    """What is older than an incarnation that we met, alive or over, is not unknown to us."""
    watch = DeathWatch(_TIMES)
    watch.meet(_A, 0.0)
    assert watch.standing(Peer("a", 4)) is Standing.SILENT
    watch.leave(_A)
    assert watch.standing(Peer("a", 4)) is Standing.SILENT
    assert watch.standing(_A) is Standing.GONE
    assert watch.standing(Peer("a", 6)) is Standing.UNKNOWN
    assert watch.incarnation_of("a") == 5


def test_a_goodbye_ends_the_watch() -> None:
    """Who says goodbye is neither due heartbeats nor found dead later, and leaves once."""
    watch = DeathWatch(_TIMES)
    watch.meet(_A, 0.0)
    assert watch.leave(_A)
    assert not watch.leave(_A)
    assert watch.next_deadline() is None
    assert watch.tick(50.0) == Verdict()


def test_our_own_pause_is_not_their_death() -> None:
    """A tick that comes 10 s late kills nobody: everybody gets fresh patience, and then dies of silence in time."""
    watch = DeathWatch(_TIMES)
    watch.meet(_A, 0.0)
    verdict = watch.tick(10.25)
    assert verdict == Verdict((_A,), (), ())
    deaths = [(at, v.dead) for at, v in _run(watch, 20.0) if v.dead]
    assert deaths == [(12.25, (_A,))]


def test_a_slightly_late_tick_still_judges() -> None:
    """Lateness under half the patience excuses nobody."""
    watch = DeathWatch(_TIMES)
    watch.meet(_A, 0.0)
    _run(watch, 1.5)
    assert watch.tick(2.7).dead == (_A,)


def test_releasing_all_forgets_all() -> None:
    """Who becomes somebody else may meet everybody again, even those whom it had held for dead."""
    watch = DeathWatch(_TIMES)
    watch.meet(_A, 0.0)
    _run(watch, 2.0)
    watch.meet(_B, 2.0)
    assert watch.release_all() == (_B,)
    assert watch.next_deadline() is None
    assert watch.standing(_A) is watch.standing(_B) is Standing.UNKNOWN
