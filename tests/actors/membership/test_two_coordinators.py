"""Membership with two coordinators: followers' cores see the one that serves, and a standby's core sees no peer."""

import itertools

from hypothesis import given, settings, strategies as st

from actorserve.core.messages import Members, Peer, PeerDown, PeerUp, Role, Serve, StandBy, Unplace
from actorserve.wire.memory_transport import MemoryTransport
from tests.actors.cluster import Cluster, address_of

A, B = COORDINATORS = ("a/coordinator", "b/coordinator")
G, W, W1 = FOLLOWERS = ("a/gateway-0", "b/worker-0", "b/worker-1")
NAMES = (*COORDINATORS, *FOLLOWERS)


def _started() -> Cluster:
    cluster = Cluster(COORDINATORS)
    for name in NAMES:
        cluster.start(name, 1)
    cluster.advance(3.0)
    assert _problems(cluster, A) == []
    return cluster


def _problems(cluster: Cluster, serving: str) -> list[str]:
    """The deviations from the state in which this coordinator serves, and all processes live."""
    me = {name: process.actor.me for name, process in cluster.processes.items()}
    wanted = {
        **{name: set[Peer]() for name in COORDINATORS},
        G: {me[serving], me[W], me[W1]},
        **{name: {me[serving], me[G]} for name in (W, W1)},
        serving: {me[name] for name in FOLLOWERS},
    }
    return [
        f"{name} sees {process.actor.peers}, told {process.core.up}"
        for name, process in cluster.processes.items()
        if not (set(process.actor.peers) == process.core.up == wanted[name])
    ]


def _serving(cluster: Cluster) -> list[str]:
    """The coordinators whose cores were told last that they serve."""
    told = {
        name: [type(m) for _, _, m in cluster.processes[name].core.log if isinstance(m, Serve | StandBy)]
        for name in COORDINATORS
    }
    return [name for name, messages in told.items() if messages and messages[-1] is Serve]


def test_only_the_one_that_serves_is_seen() -> None:
    """A standby's core is told that it stands by, and never of a peer."""
    cluster = _started()
    assert _serving(cluster) == [A]
    standby = [message for _, _, message in cluster.processes[B].core.log]
    assert standby == [StandBy(0, ""), StandBy(10, A)]


def test_messages_of_a_coordinator_that_does_not_serve_are_dropped() -> None:
    """A standby that believes that it serves cannot place, move or introduce anything."""
    cluster = _started()
    stranger = MemoryTransport(cluster.hub, Peer(B, 1), "memory://elsewhere", lambda: cluster.now)
    stranger.connect(Peer(G, 1), address_of(G))
    before = len(cluster.processes[G].core.log)
    stranger.send(Peer(G, 1), Unplace("r", 1))
    stranger.send(Peer(G, 1), Members((W,), (7,), (Role.WORKER,), (address_of(W),)))
    cluster.advance(0.01)
    assert len(cluster.processes[G].core.log) == before
    assert cluster.processes[G].membership.counts["out of term"] == 2


def test_a_takeover_takes_the_old_one_down_first() -> None:
    """A follower's core sees PeerDown of the dead coordinator and then PeerUp of the next one, within a second."""
    cluster = _started()
    cluster.kill(A)
    cluster.advance(1.0)
    changes = [m for _, _, m in cluster.processes[W].core.log if isinstance(m, PeerUp | PeerDown)]
    assert changes[-2:] == [PeerDown(Peer(A, 1)), PeerUp(Peer(B, 1), Role.COORDINATOR, None, 21)]
    cluster.start(A, 2)
    cluster.advance(5.0)
    assert _problems(cluster, B) == []


def test_a_coordinator_that_was_paused_for_long_rejoins_as_a_standby() -> None:
    """It counted as dead, so it is fenced, and comes back as a new incarnation that stands by."""
    cluster = _started()
    cluster.processes[A].is_paused = True
    cluster.advance(10.0)
    cluster.processes[A].is_paused = False
    cluster.advance(10.0)
    assert cluster.processes[A].actor.me.incarnation > 1
    assert (_problems(cluster, B), _serving(cluster)) == ([], [B])


_ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["start", "kill", "leave", "pause", "resume"]), st.sampled_from(NAMES)),
    st.tuples(st.sampled_from(["cut", "heal"]), st.sampled_from(list(itertools.combinations(NAMES, 2)))),
    st.tuples(st.just("wait"), st.floats(0.0, 1.0) | st.floats(2.0, 6.0)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(_ACTIONS, max_size=25))
def test_whatever_happens_all_follow_one_coordinator_in_the_end(actions: list[tuple[str, object]]) -> None:
    """After any starts, kills, leaves, pauses and cuts, one coordinator serves once it is quiet, and stays."""
    cluster = Cluster(COORDINATORS)
    incarnations = itertools.count(10**6, 1000)
    for action, what in actions:
        match action, what:
            case "start", str(name) if name not in cluster.processes:
                cluster.start(name, next(incarnations))
            case _:
                cluster.disturb(action, what)
    cluster.calm_down(NAMES, incarnations)
    (serving,) = _serving(cluster)
    assert _problems(cluster, serving) == []
    cluster.advance(10.0)
    assert (_serving(cluster), _problems(cluster, serving)) == ([serving], [])
