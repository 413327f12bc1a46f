"""The death watch: silence, incarnations, goodbyes, and pauses of our own process."""

import pytest
from hypothesis import given, strategies as st

from actorserve.actors.membership.death_watch import DeathWatch, Standing, Verdict, WatchTimes
from actorserve.core.messages import Peer

_TIMES = WatchTimes(heartbeat_s=0.25, death_after_s=2.0)
_A, _B = Peer("a", 5), Peer("b", 5)


def _run(watch: DeathWatch, until: float) -> list[tuple[float, Verdict]]:
    """Tick at every deadline up to ``until``."""
    verdicts = []
    while (deadline := watch.next_deadline()) is not None and deadline <= until:
        verdicts.append((deadline, watch.tick(deadline)))
    return verdicts


def test_no_peer_is_watched_at_first() -> None:
    """Without peers there is no deadline, and a tick finds nothing."""
    watch = DeathWatch(_TIMES)
    assert watch.next_deadline() is None
    assert watch.tick(100.0) == Verdict()
    assert watch.standing(_A) is Standing.UNKNOWN
    assert not watch.heard(_A, 0.0)


def test_heartbeats_are_due_regularly() -> None:
    """Every living peer is due a heartbeat ``heartbeat_s`` after its last one."""
    watch = DeathWatch(_TIMES)
    watch.meet(_A, 0.0)
    watch.meet(_B, 0.125)
    due = [(at, v.heartbeats_due) for at, v in _run(watch, 0.7)]
    assert due == [(0.25, (_A,)), (0.375, (_B,)), (0.5, (_A,)), (0.625, (_B,))]


def test_a_peer_that_was_sent_anything_is_due_no_heartbeat() -> None:
    """A peer's next heartbeat is due one ``heartbeat_s`` after the last message to it."""
    watch = DeathWatch(_TIMES)
    for peer in (_A, _B):
        watch.meet(peer, 0.0)
    watch.sent(_A, 0.125)
    watch.sent(Peer("unknown", 1), 0.125)
    due = [(at, v.heartbeats_due) for at, v in _run(watch, 0.4)]
    assert due == [(0.25, (_B,)), (0.375, (_A,))]


def test_silence_is_found_while_no_heartbeat_is_due() -> None:
    """A silent peer is found dead in time, even if our messages to it leave no heartbeat due."""
    watch = DeathWatch(_TIMES)
    watch.meet(_A, 0.0)
    deaths = []
    for at in [0.125 * i for i in range(1, 20)]:
        watch.sent(_A, at)
        deaths += [(when, verdict.dead) for when, verdict in _run(watch, at) if verdict.dead]
    assert deaths == [(2.0, (_A,))]


def test_heartbeats_to_many_are_spread() -> None:
    """Heartbeats to a thousand peers met at one moment are spread, and none comes later than 1.5 intervals."""
    watch = DeathWatch(_TIMES)
    last_s = {Peer(f"worker-{number}", 1): 0.0 for number in range(1000)}
    for peer in last_s:
        watch.meet(peer, 0.0)
    now = 0.0
    while (at := watch.next_deadline()) is not None and at < 3.0:
        now = at
        for peer in last_s:
            watch.heard(peer, now)
        due = watch.tick(now).heartbeats_due
        assert len(due) <= 125
        for peer in due:
            assert _TIMES.heartbeat_s <= now - last_s[peer] <= 1.5 * _TIMES.heartbeat_s
            last_s[peer] = now
    assert all(now - at <= 1.5 * _TIMES.heartbeat_s for at in last_s.values())


def test_silence_is_suspect_and_then_death() -> None:
    """A silent peer is suspected after 0.625 s and dead at 2 s; a peer that is heard stays alive."""
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
    """An incarnation that is older than one that we met does not count as unknown, even if that one has ended."""
    watch = DeathWatch(_TIMES)
    watch.meet(_A, 0.0)
    assert watch.standing(Peer("a", 4)) is Standing.SILENT
    watch.leave(_A)
    assert watch.standing(Peer("a", 4)) is Standing.SILENT
    assert watch.standing(_A) is Standing.GONE
    assert watch.standing(Peer("a", 6)) is Standing.UNKNOWN
    assert watch.incarnation_of("a") == 5


def test_a_goodbye_ends_the_watch() -> None:
    """A peer that said goodbye gets no heartbeat, is not found dead later, and can leave only once."""
    watch = DeathWatch(_TIMES)
    watch.meet(_A, 0.0)
    assert watch.leave(_A)
    assert not watch.leave(_A)
    assert watch.next_deadline() is None
    assert watch.tick(50.0) == Verdict()


def test_our_own_pause_kills_no_peer() -> None:
    """A tick that comes 10 s late counts as punctual, so a silent peer dies 10 s later than without the delay."""
    watch = DeathWatch(_TIMES)
    watch.meet(_A, 0.0)
    verdict = watch.tick(10.25)
    assert verdict == Verdict((_A,), (), ())
    deaths = [(at, v.dead) for at, v in _run(watch, 20.0) if v.dead]
    assert deaths == [(12.0, (_A,))]


def test_being_behind_lengthens_the_limits_of_silence() -> None:
    """While we are behind, silent peers are not suspected, and they die after five times ``death_after_s``."""
    watch = DeathWatch(_TIMES)
    watch.meet(_A, 0.0)
    deaths = []
    while (now := watch.next_deadline()) is not None and now < 20.0:
        verdict = watch.tick(now, is_behind=True)
        assert verdict.suspects == ()
        deaths += [(now, verdict.dead)] * bool(verdict.dead)
    assert deaths == [(10.0, (_A,))]


def test_a_peer_that_was_not_heard_when_we_caught_up_is_dead() -> None:
    """The first tick after we caught up counts all of the silence until then."""
    watch = DeathWatch(_TIMES)
    watch.meet(_A, 0.0)
    watch.meet(_B, 0.0)
    for at in [0.25 * i for i in range(1, 20)]:
        assert watch.tick(at, is_behind=True).dead == ()
    watch.heard(_B, 4.9)
    assert watch.tick(5.0).dead == (_A,)


@given(st.lists(st.floats(0.001, 5.0), min_size=1, max_size=60), st.floats(0.0, 0.5))
def test_however_slow_we_are_a_beating_peer_lives(steps_s: list[float], phase_s: float) -> None:
    """A peer whose heartbeats come in time never dies, even if our steps handle them late."""
    watch = DeathWatch(_TIMES)
    watch.meet(_A, 0.0)
    now = 0.0
    beat_at = phase_s
    for step_s in steps_s:
        has_beaten = beat_at <= now
        while beat_at <= now:
            beat_at += 1.5 * _TIMES.heartbeat_s
        now += step_s  # the step handles the messages that it took, and then ticks
        if has_beaten:
            assert watch.heard(_A, now)
        assert watch.tick(now).dead == ()


def test_releasing_all_forgets_all() -> None:
    """A new incarnation of ours may meet all peers again, even those that counted as dead."""
    watch = DeathWatch(_TIMES)
    watch.meet(_A, 0.0)
    _run(watch, 2.0)
    watch.meet(_B, 2.0)
    assert watch.release_all() == (_B,)
    assert watch.next_deadline() is None
    assert watch.standing(_A) is watch.standing(_B) is Standing.UNKNOWN
