"""Auto-scaling of prompt and token pools over virtual time: which pool gets an instance, and which one gives one."""

from dataclasses import replace

from actorserve.core.cluster.scaling import ScalingConfig
from actorserve.core.messages import Command, InstanceRole, Peer, Place, Unplace
from actorserve.core.pools.config import PoolsConfig
from tests.core.harness.fleets import GATEWAY
from tests.core.harness.scaled import CONFIG, Cluster, Load

CONSOLE = Peer("console-alice", 1)
MIXED, PROMPT, TOKEN = InstanceRole.MIXED, InstanceRole.PROMPT, InstanceRole.TOKEN
POOLS = PoolsConfig(tpot_target_s=0.1)
QUIET = replace(CONFIG, scale_in_above=1e9)  # no instance ends for its memory


def load(role: InstanceRole, needed: int = 0, running: int = 0, **fields: object) -> Load:
    return Load(needed, running, {"role": role, **fields})


def cluster(*loads: Load, config: ScalingConfig = QUIET) -> Cluster:
    """The instances compute 100 tokens of prompts a second."""
    return Cluster(*loads, config=config, pools=POOLS)


def roles(found: Cluster) -> dict[str, str]:
    """What each instance does now."""
    return {view.peer.name: view.role.value for view in found.state.fleet.views.values()}


def place_prompts(found: Cluster, seconds: float, tokens_per_s: int) -> list[tuple[float, str]]:
    """Prompts come evenly, and the instances compute them at once; the decisions in that time."""
    decided = found.run(0.25)
    for _ in range(round(seconds)):
        name = f"r{found.now}"
        found.handle(Place(name, 1, tokens_per_s), found.now, GATEWAY)
        found.handle(Unplace(name, 1), found.now, GATEWAY)
        decided += found.run(1.0)
    return decided


def test_memory_of_prompt_instances_hides_no_shortage() -> None:
    """Requests decode on other instances, so an empty prompt instance is no room for them, and a token one is added."""
    found = cluster(load(PROMPT), load(TOKEN, 950, 10))
    assert found.run(3.0) == [(2.25, "start token")]


def test_a_newcomer_computes_what_it_was_started_for() -> None:
    """It comes up as mixed, and the coordinator gives it the role of the pool that was short, and says so."""
    found = cluster(load(PROMPT), load(TOKEN, 950, 10))
    found.run(3.0)
    found.come("worker-2", load(MIXED))
    found.run(0.5)
    assert roles(found)["worker-2"] == TOKEN.value
    told = str(found.state.operators.events.table(0, found.now))
    assert "one more worker is started for the token pool" in told
    assert "token, because it was started for that pool" in told


def test_a_newcomer_with_another_role_in_its_settings_changes_it() -> None:
    """A worker that was once a prompt worker by its settings is started again, because tokens need it."""
    found = cluster(load(PROMPT), load(TOKEN, 950, 10))
    found.run(3.0)
    found.come("worker-2", load(PROMPT))
    found.run(0.5)
    assert roles(found)["worker-2"] == TOKEN.value


def test_prompts_that_press_their_pool_get_an_instance() -> None:
    """Prompts of two seconds come in each second to one prompt instance, and tokens have room."""
    found = cluster(load(PROMPT), load(TOKEN, 10, 1))
    decided = place_prompts(found, 10.0, 200)
    assert [what for _, what in decided][:1] == ["start prompt"]


def test_tokens_that_miss_their_target_get_an_instance() -> None:
    """Memory is free, but iterations take twice their target."""
    found = cluster(load(PROMPT), load(TOKEN, 10, 1, decode_s=0.2))
    assert found.run(3.0) == [(2.25, "start token")]


def test_prompt_instances_on_their_way_count() -> None:
    """One shortage of prompts starts one instance, and a second one only if two do not suffice."""
    found = cluster(load(PROMPT), load(TOKEN, 10, 1))
    # One second and a fifth of prompts a second, which 2 instances bear, each busy for 0.8 of its time.
    assert [what for _, what in place_prompts(found, 25.0, 120)] == ["start prompt"]
    found = cluster(load(PROMPT), load(TOKEN, 10, 1))
    assert [what for _, what in place_prompts(found, 25.0, 220)] == ["start prompt", "start prompt"]


def test_of_two_short_pools_the_more_pressed_one_comes_first() -> None:
    """Both pools are over what they are to bear for equally long."""
    slow = cluster(load(PROMPT, pending_prompt_tokens=1200), load(TOKEN, 10, 1, decode_s=0.25))
    assert [what for _, what in slow.run(5.0)] == ["start token", "start prompt"]
    queued = cluster(load(PROMPT, pending_prompt_tokens=4000), load(TOKEN, 10, 1, decode_s=0.15))
    assert [what for _, what in queued.run(2.5)] == ["start prompt"]


def test_a_mixed_instance_is_added_where_no_token_pool_is() -> None:
    """Mixed instances decode what the prompt pool computes, so a further one of them is what is short."""
    found = cluster(load(PROMPT), load(MIXED, 950, 10))
    assert found.run(3.0) == [(2.25, "start mixed")]


def test_a_pool_that_lost_its_last_instance_gets_one() -> None:
    """The prompt instance dies, and token instances that help out are no prompt pool."""
    found = cluster(load(PROMPT), load(TOKEN, 10, 1), load(TOKEN, 10, 1))
    assert found.run(3.0) == []
    found.go("worker-0")
    assert [what for _, what in found.run(4.0)] == ["start prompt"]


def test_the_pools_that_load_are_not_missed() -> None:
    """The token instance comes up long before the prompt instance, which is still loading its model."""
    found = cluster(config=replace(QUIET, num_initial=2))
    found.come("worker-0", load(TOKEN, 10, 1))
    assert found.run(20.0) == []


def test_the_least_pressed_pool_gives_an_instance() -> None:
    """Tokens keep their instances half busy and nothing else comes, so a prompt instance ends; later the last one of
    each pool stays.
    """
    busy = {"decode_s": 0.05}
    ends = replace(CONFIG, scale_in_above=100.0)
    found = cluster(load(PROMPT), load(PROMPT), load(TOKEN, 100, 1, **busy), load(TOKEN, 100, 1, **busy), config=ends)
    assert found.run(2.25) == [(2.25, "worker-0")]
    assert "it is not needed now in the prompt pool, and ends" in str(found.state.operators.events.table(0, 5.0))
    found.loads[Peer("worker-0", 1)].fields["draining"] = True
    found.run(0.5)
    found.go("worker-0")
    # Two token instances of 0.5 of their target: one alone would be over what it bears easily.
    assert found.run(20.0) == []
    for name in ("worker-2", "worker-3"):
        found.loads[Peer(name, 1)] = load(TOKEN, 100, 1, decode_s=0.01)
    assert {what for _, what in found.run(3.0)} == {"worker-2"}
    found.go("worker-2")
    assert found.run(20.0) == []


def test_a_prompt_instance_that_is_needed_does_not_end() -> None:
    """Prompts of one second come in each second; one of two instances could not bear them easily."""
    found = cluster(load(PROMPT), load(PROMPT), load(TOKEN, 10, 1))
    assert place_prompts(found, 20.0, 100) == []


def test_an_operators_number_is_reached_in_both_pools() -> None:
    """``scale 6`` in an idle cluster makes both pools equal, and ``scale 2`` leaves one instance of each."""
    found = cluster(load(PROMPT), load(TOKEN), config=replace(QUIET, max_workers=6))
    found.handle(Command("c1", "scale", ("6",)), found.now, CONSOLE)
    started: list[str] = []
    while len(found.loads) < 6:
        for _, what in found.run(0.25):
            started.append(what)
            found.come(f"worker-{len(found.loads)}", load(MIXED))
    found.run(1.0)
    assert sorted(roles(found).values()) == ["prompt"] * 3 + ["token"] * 3
    found.handle(Command("c2", "scale", ("2",)), found.now, CONSOLE)
    for _ in range(40):
        for _, name in found.run(0.25):
            if Peer(name, 1) in found.loads:
                found.go(name)
    assert sorted(roles(found).values()) == ["prompt", "token"]
