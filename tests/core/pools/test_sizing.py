"""Which instances change between the prompt and the token pool."""

from dataclasses import replace

from hypothesis import example, given, strategies as st

from actorserve.core.messages import InstanceRole, Peer, Speed
from actorserve.core.placement.instance_view import InstanceView
from actorserve.core.pools.config import PoolsConfig
from actorserve.core.pools.pressure import EASY, WINDOW_S, PoolPressure
from actorserve.core.pools.sizing import REST_S, PoolSizing
from actorserve.core.timing.speeds import InstanceSpeeds
from tests.core.harness.fleets import MODEL, fleet_of, report

MIXED, PROMPT, TOKEN = InstanceRole.MIXED, InstanceRole.PROMPT, InstanceRole.TOKEN
TPOT_TARGET_S = 0.1


LONG_AGO_S = -1000.0
SHORTEST_S = 0.01  # iteration


class Pools:
    """Instances that compute 100 tokens of prompts in a second, or as ``speeds`` say, and their sizing. The first
    prompt came long ago, if it did not come just now.
    """

    def __init__(
        self,
        *views: InstanceView,
        speeds: dict[str, float] | None = None,
        across_kinds: bool = False,
        began_s: float = LONG_AGO_S,
    ) -> None:
        self.fleet = fleet_of(views)
        known = InstanceSpeeds()
        for view in views:
            tokens_per_s = (speeds or {}).get(view.peer.name, 100.0)
            known.learn(view.peer, Speed((100, 1000), (100 / tokens_per_s, 1000 / tokens_per_s), SHORTEST_S))
        config = PoolsConfig(follow_load=True, tpot_target_s=TPOT_TARGET_S, across_kinds=across_kinds)
        self.pressure = PoolPressure(config, known)
        self.sizing = PoolSizing(self.fleet, known, self.pressure)
        for view in views:
            self.pressure.on_place(view, 0, began_s)

    def place(self, name: str, num_tokens: int, now: float = 0.0) -> None:
        self.pressure.on_place(self.fleet.views[Peer(name, 1)], num_tokens, now)

    def round(self, now: float = 0.0, num_waiting_tokens: int = 0, fixed: tuple[str, ...] = ()) -> dict[str, str]:
        """The new roles by name, which the instances have from then on."""
        changes = self.sizing.round(now, num_waiting_tokens, [Peer(name, 1) for name in fixed])
        for view, role in changes:
            self.fleet.set_role(view, role)
        self.fleet.validate()
        return {view.peer.name: role.value for view, role in changes}


def instances(
    role: InstanceRole, *names: str, kind: str = "k", decode_s: float = 0.0, **fields: int
) -> list[InstanceView]:
    """By default a token instance has one request, which costs it hardly anything."""
    fields = {"running": 1, **fields} if role is TOKEN else fields
    return [
        InstanceView(Peer(name, 1), kind, MODEL, replace(report(**fields), role=role, decode_s=decode_s))
        for name in names
    ]


def test_a_token_instance_computes_prompts_when_these_queue() -> None:
    """Prompts of 4 seconds a second come to 2 instances, and tokens take a tenth of their target."""
    pools = Pools(*instances(PROMPT, "p1", "p2"), *instances(TOKEN, "t1", "t2", "t3", decode_s=0.01))
    pools.place("p1", int(4 * 100 * WINDOW_S))
    assert len(pools.round()) == 1
    assert pools.round(0.5) == {}, "one round in a period"
    pools.place("p1", 4 * 100)
    assert len(pools.round(1.0)) == 1
    pools.place("p1", 4 * 100)
    assert pools.round(2.0) == {}, "the last token instance stays"


def test_a_prompt_instance_computes_tokens_when_these_miss_their_target() -> None:
    """Iterations of the token instance take twice their target, and no prompts come."""
    pools = Pools(*instances(PROMPT, "p1", "p2"), *instances(TOKEN, "t1", decode_s=2 * TPOT_TARGET_S))
    (changed,) = pools.round().items()
    assert changed[1] == TOKEN.value


def test_a_prompt_instance_computes_tokens_when_memory_is_short() -> None:
    """Memory counts though iterations are fast."""
    pools = Pools(*instances(PROMPT, "p1", "p2"), *instances(TOKEN, "t1", used=950))
    assert list(pools.round().values()) == [TOKEN.value]


def test_requests_that_decode_on_prompt_instances_count_for_the_token_pool() -> None:
    """The token pool bears its load easily, but twice as many requests again decode outside."""
    crowded = instances(PROMPT, "p1", "p2", num_decoding=4)
    tokens = instances(TOKEN, "t1", running=4, decode_s=0.6 * TPOT_TARGET_S)
    assert list(Pools(*crowded, *tokens).round().values()) == [TOKEN.value]
    assert Pools(*instances(PROMPT, "p1", "p2"), *tokens).round() == {}


def test_what_an_instance_still_decodes_counts_when_its_role_changes() -> None:
    """A token instance becomes a prompt instance. Its requests go to the other two, so that no further one follows."""
    tokens = instances(TOKEN, "t1", "t2", "t3", running=6, num_decoding=6, decode_s=0.5 * TPOT_TARGET_S)
    pools = Pools(*instances(PROMPT, "p1"), *tokens)
    pools.place("p1", int(2.6 * 100 * WINDOW_S))
    assert len(pools.round()) == 1
    assert pools.round(1.0) == {}


def test_memory_that_requests_hold_on_prompt_instances_counts_for_the_token_pool() -> None:
    """Two fifths of the token instance are in use, and the KV that is still to come there takes as much again."""
    tokens = instances(TOKEN, "t1", used=400)
    assert Pools(*instances(PROMPT, "p1", "p2"), *tokens).round() == {}
    crowded = instances(PROMPT, "p1", "p2", num_decoding=1, kv_decoding_bytes=200)
    assert list(Pools(*crowded, *tokens).round().values()) == [TOKEN.value]


def test_a_request_that_decodes_outside_an_idle_pool_needs_no_instance() -> None:
    pools = Pools(*instances(PROMPT, "p1", "p2", num_decoding=1), *instances(TOKEN, "t1", running=0))
    assert pools.round() == {}


def test_prompts_that_wait_for_any_instance_count() -> None:
    pools = Pools(*instances(PROMPT, "p1"), *instances(TOKEN, "t1", "t2"))
    assert pools.round() == {}
    assert list(pools.round(1.0, num_waiting_tokens=5000).values()) == [PROMPT.value]


def test_a_load_that_has_just_begun_counts_as_what_comes_in_a_second() -> None:
    """Prompts of 3 seconds in the first 2 seconds press one instance; over the whole window they would not."""
    pools = Pools(*instances(PROMPT, "p1"), *instances(TOKEN, "t1", "t2"), began_s=0.0)
    pools.place("p1", 300, 1.0)
    assert list(pools.round(2.0).values()) == [PROMPT.value]
    pools = Pools(*instances(PROMPT, "p1"), *instances(TOKEN, "t1", "t2"))
    pools.place("p1", 300, 1.0)
    assert pools.round(2.0) == {}


def test_the_shortest_iteration_presses_nothing() -> None:
    """Of a target of 100 ms an iteration of one request takes 90 ms, and little more with the others. A token instance
    can be spared, because what counts is the time beyond the shortest iteration.
    """
    views = [*instances(PROMPT, "p1"), *instances(TOKEN, "t1", "t2", "t3", decode_s=0.092)]
    fleet, known = fleet_of(views), InstanceSpeeds()
    for view in views:
        known.learn(view.peer, Speed((100, 1000), (1.0, 10.0), 0.09))
    pressure = PoolPressure(PoolsConfig(follow_load=True, tpot_target_s=TPOT_TARGET_S), known)
    sizing = PoolSizing(fleet, known, pressure)
    pressure.on_place(views[0], 0, LONG_AGO_S)
    pressure.on_place(views[0], int(0.75 * 100 * WINDOW_S), 0.0)
    assert [role.value for _, role in sizing.round(0.0)] == [PROMPT.value]


def test_prompts_of_mixed_instances_do_not_count() -> None:
    """What a mixed instance computes needs no prompt instance."""
    pools = Pools(*instances(PROMPT, "p1"), *instances(TOKEN, "t1", "t2"), *instances(MIXED, "m1"))
    pools.place("m1", 10_000)
    assert pools.round() == {}


def test_nothing_changes_while_both_pools_bear_their_load() -> None:
    """Prompts keep one of two instances busy for 60 % of its time, and tokens take 60 % of their target."""
    pools = Pools(*instances(PROMPT, "p1", "p2"), *instances(TOKEN, "t1", "t2", decode_s=0.6 * TPOT_TARGET_S))
    pools.place("p1", int(0.6 * 100 * WINDOW_S))
    assert pools.round() == {}


def test_nothing_changes_if_the_other_pool_would_suffer_more() -> None:
    """Both pools have too much to do, the prompts a little more."""
    pools = Pools(*instances(PROMPT, "p1", "p2"), *instances(TOKEN, "t1", "t2", decode_s=1.4 * TPOT_TARGET_S))
    pools.place("p1", int(2.4 * 100 * WINDOW_S))
    assert pools.round() == {}


def test_the_way_back_waits() -> None:
    """The load that was measured just after a change still shows the former pools."""
    pools = Pools(*instances(PROMPT, "p1"), *instances(TOKEN, "t1", "t2", "t3", decode_s=0.95 * TPOT_TARGET_S))
    pools.place("p1", int(4 * 100 * WINDOW_S))
    assert list(pools.round().values()) == [PROMPT.value]
    assert pools.round(REST_S - 1.0) == {}
    assert list(pools.round(REST_S + 2 * WINDOW_S).values()) == [TOKEN.value]


def test_the_fastest_instances_compute_prompts() -> None:
    """A capped machine decodes as fast, so it gives up prompts first and gets them last."""
    speeds = {"slow-p": 50.0, "slow-t": 50.0}
    prompts = instances(PROMPT, "slow-p", "p")
    tokens = instances(TOKEN, "slow-t", "t", decode_s=0.01)
    pools = Pools(*prompts, *tokens, speeds=speeds)
    pools.place("p", 10_000)
    assert pools.round() == {"t": PROMPT.value}
    tokens = instances(TOKEN, "slow-t", "t", decode_s=2 * TPOT_TARGET_S)
    assert Pools(*prompts, *tokens, speeds=speeds).round() == {"slow-p": TOKEN.value}


def test_of_equal_instances_the_one_with_least_work_changes() -> None:
    busy = instances(TOKEN, "t1", running=5, used=500)
    pools = Pools(*instances(PROMPT, "p1"), *busy, *instances(TOKEN, "t2", used=100))
    pools.place("p1", 10_000)
    assert pools.round() == {"t2": PROMPT.value}


def test_an_instance_keeps_the_role_that_an_operator_gave_it() -> None:
    pools = Pools(*instances(PROMPT, "p1"), *instances(TOKEN, "t1", "t2"))
    pools.place("p1", 10_000)
    assert pools.round(fixed=("t1", "t2")) == {}
    pools.place("p1", 10_000, 1.0)
    assert pools.round(1.0, fixed=("t2",)) == {"t1": PROMPT.value}


def test_mixed_and_cordoned_instances_do_not_change() -> None:
    pools = Pools(*instances(PROMPT, "p1"), *instances(TOKEN, "t1", "t2"), *instances(MIXED, "m1"))
    pools.fleet.drain(pools.fleet.views[Peer("t1", 1)])
    pools.place("p1", 10_000)
    assert pools.round() == {}, "one token instance is left, and it stays"


def test_kinds_are_sized_apart_unless_answers_may_cross_them() -> None:
    """The other kind's token instances cannot compute the tokens of these prompts, so they do not help."""
    views = [
        *instances(PROMPT, "a-p", kind="a"),
        *instances(TOKEN, "a-t", kind="a"),
        *instances(PROMPT, "b-p", kind="b"),
        *instances(TOKEN, "b-t1", "b-t2", kind="b"),
    ]
    apart = Pools(*views)
    apart.place("a-p", 10_000)
    assert apart.round() == {}
    together = Pools(*views, across_kinds=True)
    together.place("a-p", 10_000)
    assert list(together.round().values()) == [PROMPT.value]


def test_a_large_fleet_changes_in_steps() -> None:
    """One instance in sixteen changes at once, because each of them moves its requests."""
    names = [f"t{number}" for number in range(60)]
    pools = Pools(*instances(PROMPT, "p1", "p2", "p3", "p4"), *instances(TOKEN, *names))
    pools.place("p1", 100_000)
    assert len(pools.round()) == 4
    assert len(pools.round(1.0)) == 4


@given(
    num_prompts=st.integers(1, 20),
    num_tokens=st.integers(1, 20),
    prompt_s=st.floats(0.0, 40.0),
    decode_s=st.floats(0.0, 0.5),
)
@example(num_prompts=15, num_tokens=10, prompt_s=8.375, decode_s=1.0 / 3.0)
def test_a_steady_load_leads_to_steady_pools(
    num_prompts: int, num_tokens: int, prompt_s: float, decode_s: float
) -> None:
    """Whatever the load, the pools soon stop to change; then no pool is pressed, or no change evens them out. One more
    change may come late, because the measured load of prompts approaches the load ever more slowly.
    """
    prompts = instances(PROMPT, *(f"p{number}" for number in range(num_prompts)))
    tokens = instances(TOKEN, *(f"t{number}" for number in range(num_tokens)))
    pools = Pools(*prompts, *tokens)
    total_decode_s = decode_s * num_tokens
    num_late = 0
    for now in range(200):
        views = pools.fleet.views.values()
        in_tokens = [view for view in views if view.role is TOKEN]
        for view in views:
            share_s = total_decode_s / len(in_tokens) if view.role is TOKEN else 0.0
            running = 1 if view.role is TOKEN else 0
            pools.fleet.on_report(
                view.peer, replace(report(now + 1, running=running), role=view.role, decode_s=share_s), float(now)
            )
        first = next(view for view in pools.fleet.views.values() if view.role is PROMPT)
        pools.place(first.peer.name, int(100 * prompt_s), float(now))
        num_late += bool(pools.round(float(now))) and now >= 100
    assert num_late <= 1, "the pools have settled"
    views = pools.fleet.views.values()
    num_prompts_now = sum(view.role is PROMPT for view in views)
    num_tokens_now = len(views) - num_prompts_now
    in_prompts = prompt_s / num_prompts_now / 0.8
    in_tokens_s = total_decode_s / num_tokens_now / TPOT_TARGET_S
    if in_prompts > max(EASY, in_tokens_s) * 1.2 and num_tokens_now > 1:
        assert in_tokens_s * num_tokens_now / (num_tokens_now - 1) * 1.2 > in_prompts * num_prompts_now / (
            num_prompts_now + 1
        )
