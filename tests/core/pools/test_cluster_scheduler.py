"""The choice of a prompt instance and a token instance for each request, and the mixed pool."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from actorserve.core.messages import InstanceRole, Peer, Place
from actorserve.core.placement.instance_view import InstanceView
from actorserve.core.pools.cluster_scheduler import ClusterScheduler
from actorserve.core.pools.config import PoolsConfig
from tests.core.harness.fleets import GATEWAY, MODEL, fleet_of, report

MIXED, PROMPT, TOKEN = InstanceRole.MIXED, InstanceRole.PROMPT, InstanceRole.TOKEN
CONFIG = PoolsConfig(max_pending_tokens=100, hold_s=2.0)


class Cluster:
    """Instances with roles, and their scheduler."""

    def __init__(self, *views: InstanceView, config: PoolsConfig = CONFIG, max_queue: int | None = 64) -> None:
        self.fleet = fleet_of(views, max_queue=max_queue)
        self.scheduler = ClusterScheduler(config, self.fleet)
        self._num_requests = 0
        self._sequence = 0

    def place(
        self,
        num_tokens: int = 8,
        now: float = 0.0,
        avoid: str = "",
        num_waiting_tokens: int | None = None,
        seed: int | None = None,
    ) -> tuple[str, str | None] | None:
        """The names of the instances that a new request goes to."""
        self._num_requests += 1
        peer = Peer(avoid, 1) if avoid else None
        place = Place(f"r{self._num_requests}", 1, num_tokens, avoid=peer)
        pair = self.scheduler.choose(place, now, seed, num_waiting_tokens)
        if pair is None:
            return None
        placed = self.fleet.place(pair.prompt, GATEWAY, place, now, token_view=pair.token)
        self.validate()
        assert placed.instance == pair.prompt.peer
        return placed.instance.name, None if placed.token_instance is None else placed.token_instance.name

    def report(self, name: str, now: float = 0.0, **fields: Any) -> None:
        """The instance reports; all requests that were sent there have arrived."""
        self._sequence += 1
        view = self.fleet.views[Peer(name, 1)]
        accepted = tuple(f"r{number}" for number in range(1, self._num_requests + 1))
        found = report(self._sequence, role=view.report.role, accepted=accepted, **fields)
        self.scheduler.on_report(self.fleet.on_report(view.peer, found, now), now)
        self.validate()

    def pool(self, name: str) -> InstanceRole:
        return self.fleet.views[Peer(name, 1)].pool

    def validate(self) -> None:
        self.fleet.validate()
        self.scheduler.validate()


def instance(name: str, role: InstanceRole, kind: str = "k", **fields: Any) -> InstanceView:
    return InstanceView(Peer(name, 1), kind, MODEL, replace(report(), role=role, **fields))


def test_a_request_gets_a_prompt_and_a_token_instance_at_once() -> None:
    """The prompt joins the shortest queue of the prompt pool, and its tokens go where most memory is free."""
    cluster = Cluster(
        instance("p1", PROMPT, pending_prompt_tokens=50),
        instance("p2", PROMPT, pending_prompt_tokens=10),
        instance("t1", TOKEN, virtual_usage_bytes=0),
        instance("t2", TOKEN, virtual_usage_bytes=500),
    )
    assert cluster.place(8) == ("p2", "t1")


def test_memory_counts_as_reserved_until_the_request_has_arrived() -> None:
    """Many prompts at once are spread over the token instances, although no report shows them yet."""
    cluster = Cluster(instance("p", PROMPT), instance("t1", TOKEN), instance("t2", TOKEN))
    chosen = [cluster.place(40) for _ in range(2)]
    assert {token for _, token in chosen if token} == {"t1", "t2"}  # type: ignore[misc]
    view = cluster.fleet.views[Peer("t1", 1)]
    assert (view.num_handoffs, view.num_handoff_blocks) == (1, 10)
    cluster.report("t1", used=100)
    assert (view.num_handoffs, view.num_handoff_blocks) == (0, 0)


def test_a_mixed_instance_keeps_its_requests() -> None:
    """In a fleet without roles one instance does both. So does a mixed one beside pools that are full."""
    cluster = Cluster(instance("a", MIXED), instance("b", MIXED, virtual_usage_bytes=500))
    assert cluster.place() == ("a", None)
    busy = Cluster(instance("p", PROMPT, pending_prompt_tokens=99), instance("m", MIXED), instance("t", TOKEN))
    assert busy.place(50) == ("m", None)


def test_an_empty_queue_takes_a_prompt_of_any_length() -> None:
    """The limit is on the queue, so a prompt that is longer than the limit drafts no instance."""
    cluster = Cluster(instance("p", PROMPT), instance("t", TOKEN))
    assert cluster.place(400) == ("p", "t")


def test_the_least_loaded_token_instance_is_drafted_for_prompts() -> None:
    """If all queues of the prompt pool are over the limit, and there is no mixed instance, a token instance computes
    the prompt and keeps the request. It goes back when no prompt is left and it has helped for long enough.
    """
    cluster = Cluster(
        instance("p", PROMPT, pending_prompt_tokens=99),
        instance("t1", TOKEN, virtual_usage_bytes=500),
        instance("t2", TOKEN),
    )
    assert cluster.place(50) == ("t2", None)
    assert cluster.pool("t2") is MIXED
    assert cluster.place(8) == ("t2", None), "the mixed pool is tried before another instance is drafted"
    cluster.report("t2", now=1.0, running=3, num_decoding=1)
    cluster.report("t2", now=3.0, running=3, num_decoding=1)
    assert cluster.pool("t2") is MIXED
    cluster.report("t2", now=4.0, running=2, num_decoding=2)
    assert cluster.pool("t2") is TOKEN


def test_bursts_some_seconds_apart_go_to_the_same_helper() -> None:
    """By default a drafted instance stays so long that the next burst of prompts goes there as well, and not to another
    one that has fewer tokens by then.
    """
    cluster = Cluster(
        instance("p", PROMPT, pending_prompt_tokens=99),
        instance("t1", TOKEN, virtual_usage_bytes=100),
        instance("t2", TOKEN),
        config=PoolsConfig(max_pending_tokens=100),
    )
    assert cluster.place(50) == ("t2", None)
    cluster.report("t2", now=5.0, running=2, num_decoding=2, used=500)
    assert cluster.place(50, now=5.0) == ("t2", None)
    cluster.report("t2", now=16.0, running=2, num_decoding=2)
    assert cluster.pool("t2") is TOKEN


def test_with_late_binding_prompts_wait_before_an_instance_is_drafted() -> None:
    """Both prompt instances have a full queue. The cluster's line may have as many tokens as their queues together."""
    prompts = [instance(name, PROMPT, num_waiting=2) for name in ("p1", "p2")]
    cluster = Cluster(*prompts, instance("t1", TOKEN), max_queue=2)
    assert cluster.place(8, num_waiting_tokens=200) is None
    assert cluster.pool("t1") is TOKEN
    assert cluster.place(8, num_waiting_tokens=201) == ("t1", None)
    assert cluster.pool("t1") is MIXED


def test_no_request_waits_for_prompt_instances_that_cannot_hold_it() -> None:
    """A request that only a token instance could ever hold goes there at once, although nothing waits."""
    cluster = Cluster(instance("p", PROMPT, kv_total_bytes=100), instance("t1", TOKEN))
    assert cluster.place(400, num_waiting_tokens=0) == ("t1", None)


def test_what_waits_for_its_prompt_takes_no_room_on_a_token_instance() -> None:
    """Four requests fill its memory once their prompts are computed. A fifth one may come, because others leave until
    then. With KV that is there already it may not.
    """
    cluster = Cluster(instance("p", PROMPT), instance("t1", TOKEN), config=PoolsConfig(max_pending_tokens=1000))
    assert [cluster.place(100) for _ in range(4)] == [("p", "t1")] * 4
    cluster.report("p")
    assert cluster.place(100) == ("p", "t1")
    cluster.report("t1", used=990, kv_needed_bytes=990)
    assert cluster.place(100) == ("p", None)


def test_a_queue_of_handed_over_requests_closes_no_token_instance() -> None:
    """The limit on queues is for prompts. Requests with their KV wait for one iteration alone."""
    cluster = Cluster(instance("p", PROMPT), instance("t1", TOKEN, num_waiting=5), max_queue=2)
    assert cluster.place(8) == ("p", "t1")


def test_a_helper_stays_for_a_while() -> None:
    """An instance whose foreign work is done at once does not go back and forth with each request."""
    cluster = Cluster(instance("p", PROMPT, pending_prompt_tokens=99), instance("t", TOKEN))
    cluster.place(50, now=1.0)
    cluster.report("t", now=2.5)
    assert cluster.pool("t") is MIXED
    cluster.report("t", now=3.0)
    assert cluster.pool("t") is TOKEN


def test_every_foreign_prompt_keeps_a_helper() -> None:
    """The helper's own queue is over the limit, too, so no instance is left to draft. It gets the next prompt in the
    middle of its time, and stays that long after this one.
    """
    cluster = Cluster(instance("p", PROMPT, pending_prompt_tokens=99, num_waiting=2), instance("t", TOKEN), max_queue=2)
    assert cluster.place(90, now=0.0, num_waiting_tokens=101) == ("t", None)
    assert cluster.place(90, now=1.5, num_waiting_tokens=101) == ("t", None)
    cluster.report("t", now=2.5, running=2, num_decoding=2)
    assert cluster.pool("t") is MIXED
    cluster.report("t", now=3.5, running=2, num_decoding=2)
    assert cluster.pool("t") is TOKEN


def test_preempted_decodes_keep_no_helper() -> None:
    """A token instance that lacks memory computes KV of its own requests again, which is no work of the prompt pool."""
    cluster = Cluster(instance("p", PROMPT, pending_prompt_tokens=99), instance("t", TOKEN))
    cluster.place(50)
    preempted = {"running": 2, "waiting": 1, "pending_prompt_tokens": 70}
    cluster.report("t", now=3.0, num_decoding=2, **preempted)
    assert cluster.pool("t") is MIXED, "one of the requests is a prompt"
    cluster.report("t", now=4.0, num_decoding=3, **preempted)
    assert cluster.pool("t") is TOKEN


def test_the_least_loaded_prompt_instance_is_drafted_for_tokens() -> None:
    """If no token instance has memory, the prompt instance with the shortest queue gets the request for its tokens."""
    cluster = Cluster(
        instance("p1", PROMPT),
        instance("p2", PROMPT, pending_prompt_tokens=50),
        instance("t", TOKEN, kv_needed_bytes=1000, kv_used_bytes=1000),
    )
    assert cluster.place(8) == ("p1", None), "the prompt's own instance is the least loaded one"
    assert cluster.pool("p1") is MIXED
    assert cluster.place(8) == ("p2", "p1")
    cluster.report("p1", now=9.0, num_decoding=1)
    assert cluster.pool("p1") is MIXED
    cluster.report("p1", now=9.1)
    assert cluster.pool("p1") is PROMPT


def test_a_drafted_prompt_instance_hands_over_once_token_instances_have_room() -> None:
    """Otherwise it would keep every request that comes, and decode for ever, after one moment without room."""
    cluster = Cluster(instance("p", PROMPT), instance("t", TOKEN, kv_needed_bytes=1000, kv_used_bytes=1000))
    assert cluster.place(8) == ("p", None)
    assert cluster.pool("p") is MIXED
    cluster.report("p", now=0.1, num_decoding=1)
    assert cluster.place(8, now=1.0) == ("p", None), "there is still no room"
    cluster.report("t", now=1.1)
    assert cluster.place(8, now=1.1) == ("p", "t")
    cluster.report("p", now=2.9)
    assert cluster.pool("p") is MIXED, "it was chosen to decode 1.9 s ago"
    cluster.report("p", now=3.1)
    assert cluster.pool("p") is PROMPT


@pytest.mark.parametrize("seed", range(20))
def test_a_gateway_alone_drafts_no_helper_beside_an_empty_queue(seed: int) -> None:
    """It draws two of the prompt instances, and both may have long queues."""
    queues = [instance(f"p{number}", PROMPT, pending_prompt_tokens=500) for number in range(9)]
    cluster = Cluster(*queues, instance("empty", PROMPT), instance("t", TOKEN))
    assert cluster.place(8, seed=seed) == ("empty", "t")
    assert cluster.pool("t") is TOKEN


@pytest.mark.parametrize("across_kinds", [False, True])
def test_other_kinds_get_tokens_only_if_the_operator_says_so(across_kinds: bool) -> None:
    """A token instance is of the prompt instance's kind, because its tokens would differ otherwise."""
    config = replace(CONFIG, across_kinds=across_kinds)
    cluster = Cluster(instance("p", PROMPT, kind="h100"), instance("t", TOKEN, kind="a100"), config=config)
    assert cluster.place() == ("p", "t" if across_kinds else None)


def test_an_instance_that_failed_the_request_gets_neither_part() -> None:
    """A request avoids the instance that it comes from, for its tokens as well."""
    cluster = Cluster(instance("p", PROMPT), instance("t1", TOKEN), instance("t2", TOKEN, virtual_usage_bytes=500))
    assert cluster.place(avoid="t1") == ("p", "t2")


def test_a_full_cluster_has_no_pair() -> None:
    """A request waits in the cluster if no instance of any pool has memory for its prompt."""
    full: dict[str, Any] = {"kv_needed_bytes": 1000, "kv_used_bytes": 1000}
    cluster = Cluster(instance("p", PROMPT, **full), instance("t", TOKEN, **full))
    assert cluster.place() is None


def test_without_late_binding_a_prompt_waits_in_its_own_pool() -> None:
    """A request that has no room anywhere goes at once to a prompt instance, however free token instances look."""
    full: dict[str, Any] = {"kv_needed_bytes": 1000, "kv_used_bytes": 1000}
    cluster = Cluster(
        instance("p", PROMPT, pending_prompt_tokens=50, **full), instance("t", TOKEN, **full), max_queue=None
    )
    placed = cluster.place()
    assert placed is not None
    assert placed[0] == "p"


_ROLES = st.lists(st.sampled_from(InstanceRole), min_size=1, max_size=5)
_EVENTS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 120), st.integers(0, 300), st.integers(0, 3), st.floats(0.0, 3.0)),
    max_size=30,
)


@given(_ROLES, _EVENTS)
def test_whatever_is_reported_requests_find_an_instance(
    roles: list[InstanceRole], events: list[tuple[int, int, int, int, float]]
) -> None:
    """As long as memory is free, every request is placed; a token instance differs from the prompt's; and drafted
    instances go back once all is done.
    """
    cluster = Cluster(*(instance(f"w{number}", role) for number, role in enumerate(roles)))
    now = 0.0
    for number, num_tokens, pending, num_decoding, seconds in events:
        now += seconds
        cluster.fleet.expire(now)
        placed = cluster.place(num_tokens, now)
        if placed is not None:
            assert placed[0] != placed[1]
        name = f"w{number % len(roles)}"
        cluster.report(name, now, pending_prompt_tokens=pending, num_decoding=num_decoding)
    now += 60.0
    cluster.fleet.expire(now)
    for number, role in enumerate(roles):
        cluster.report(f"w{number}", now)
        assert cluster.pool(f"w{number}") is role
    assert cluster.place(8, now) is not None
