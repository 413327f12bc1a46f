"""Roles that follow the load, as the coordinator orders them."""

from actorserve.core.effects import Effect, Send
from actorserve.core.messages import Command, InstanceRole, Peer, SetRole, Tick
from actorserve.core.pools.config import PoolsConfig
from tests.core.harness.coordinator import Coordinator

PROMPT, TOKEN = InstanceRole.PROMPT, InstanceRole.TOKEN
P, T, U, V = (Peer(f"worker-{number}", 1) for number in range(4))
CONSOLE = Peer("console-alice", 1)


def coordinator(*, follow_load: bool = True) -> Coordinator:
    """One prompt instance, which computes 100 tokens a second, and three token instances with little to do."""
    made = Coordinator(P, T, U, V, pools=PoolsConfig(follow_load=follow_load, tpot_target_s=0.1))
    made.report(P, 1000, role=PROMPT)
    made.report(T, 900, role=TOKEN)
    made.report(U, 900, role=TOKEN)
    made.report(V, 900, role=TOKEN)
    return made


def orders(effects: list[Effect]) -> list[tuple[str, InstanceRole]]:
    return [
        (effect.to.name, effect.message.role)
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.message, SetRole)
    ]


def queue_prompts(made: Coordinator) -> None:
    for number in range(9):
        made.place(f"r{number}", 100)


def test_a_token_instance_is_told_to_compute_prompts() -> None:
    """Nine seconds of prompts come at once; the order is repeated until a report shows the role, and it is an event."""
    made = coordinator()
    queue_prompts(made)
    ((name, role),) = orders(made.handle(Tick(), 1.0))
    assert role is PROMPT
    peer = Peer(name, 1)
    assert made.state.fleet.views[peer].pool is PROMPT
    made.report(peer, 900, 1.1, role=TOKEN)
    assert made.state.fleet.views[peer].pool is PROMPT, "the order is on its way"
    made.report(peer, 900, 1.2, role=PROMPT)
    assert made.state.fleet.views[peer].role_ordered is None
    assert "because that pool is more pressed" in str(made.state.operators.events.table(0, 2.0))


def test_a_prompt_that_no_instance_takes_counts_once() -> None:
    """An instance refuses a prompt again and again, and the gateway asks for another placement each time."""
    for is_one in (False, True):
        made = coordinator()
        for number in range(9):
            made.place("r" if is_one else f"r{number}", 10, epoch=1 + number)
        assert len(orders(made.handle(Tick(), 4.0))) == (0 if is_one else 1)


def test_roles_stay_unless_they_are_to_follow_the_load() -> None:
    made = coordinator(follow_load=False)
    queue_prompts(made)
    assert orders(made.handle(Tick(), 1.0)) == []


def test_an_operators_role_stays() -> None:
    """All token instances were given that role by the console."""
    made = coordinator()
    for number, peer in enumerate((T, U, V)):
        made.handle(Command(f"c{number}", "role", (peer.name, "token")), 0.0, CONSOLE)
    queue_prompts(made)
    assert orders(made.handle(Tick(), 1.0)) == []
