"""Late binding: which requests wait in the cluster, in which order they get free room, and which are refused."""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from actorserve.core.effects import Send
from actorserve.core.messages import (
    LoadReport,
    Peer,
    PeerDown,
    Place,
    Placed,
    RefusalReason,
    Refused,
    Speed,
    Tick,
    Unplace,
)
from actorserve.core.migration.pairing import PairingConfig
from actorserve.core.placement.fleet import Fleet
from tests.core.harness.coordinator import A, B, Coordinator, placements
from tests.core.harness.fleets import GATEWAY


def test_a_request_goes_at_once_where_it_fits_or_waits() -> None:
    """If any instance admits it, a request goes to the freest that does; else it waits until one reports room."""
    coordinator = Coordinator(A, B)
    coordinator.report(A, 500)
    coordinator.report(B, 300)
    assert placements(coordinator.place("r1", 400)) == [("r1", "worker-0")]
    assert coordinator.place("r2", 400) == []
    assert coordinator.report(A, 390, now=1.0) == []
    effects = coordinator.handle(LoadReport(9, 1, 0, 1000, 0, 0, 10, 10, 0), 2.5, B)
    assert effects == [Send(GATEWAY, Placed("r2", 1, B, waited_s=2.5))]
    assert not coordinator.state.waiting


def test_the_hosts_pool_counts_as_room() -> None:
    """Another prompt may use all device and host memory that started requests leave free."""
    coordinator = Coordinator(A)
    coordinator.report(A, -500, host_total_bytes=600)
    assert placements(coordinator.place("r1", 101)) == []
    assert placements(coordinator.place("r2", 100)) == [("r2", "worker-0")]


def test_requests_that_yield_take_no_room() -> None:
    """A new request may take the memory of preempted requests that leave it to new ones."""
    coordinator = Coordinator(A)
    coordinator.report(A, -500, host_total_bytes=600, kv_yielding_bytes=200)
    assert placements(coordinator.place("r1", 301)) == []
    assert placements(coordinator.place("r2", 300)) == [("r2", "worker-0")]


def test_what_waits_at_an_instance_takes_room_there() -> None:
    """A report that accepts a placement does not offer its memory again while the request waits at the instance."""
    coordinator = Coordinator(A)
    coordinator.report(A, 1000)
    assert placements(coordinator.place("r1", 700)) == [("r1", "worker-0")]
    assert coordinator.place("r2", 400) == []
    waits = {"waiting": 1, "kv_head_bytes": 700, "kv_wanted_bytes": 700}
    assert coordinator.report(A, 1000, now=0.1, **waits) == []
    assert coordinator.report(A, 1000, now=0.2) == [("r2", "worker-0")]


def test_a_full_queue_admits_no_request() -> None:
    """An instance whose queue is full, placements in flight included, gets more only when its queue is shorter."""
    coordinator = Coordinator(A, max_queue_per_instance=3)
    coordinator.report(A, 1000, waiting=1)
    assert [bool(placements(coordinator.place(f"r{i}", 10))) for i in range(4)] == [True, True, False, False]
    assert coordinator.report(A, 1000, waiting=3) == []
    assert coordinator.report(A, 1000, waiting=2) == [("r2", "worker-0")]


def test_short_prompts_come_first_until_long_ones_are_promoted() -> None:
    """A waiting request stands in the level of its prefill time, and in the first level from its promotion on."""
    for now, order in ((1.0, ["short", "new", "long"]), (5.0, ["long", "short", "new"])):
        coordinator = Coordinator(A, promote_after_s=5.0)
        coordinator.report(A, 0)
        coordinator.place("long", 300, 0.0)
        coordinator.place("short", 90, 0.5)
        coordinator.place("new", 100, 1.0)
        # The promoted request goes to the back of the first level, before requests that are promoted after it.
        if now == 5.0:
            coordinator.handle(Unplace("unknown", 1), now)
            coordinator.report(A, 90, now)
            coordinator.report(A, 0, now)
            coordinator.place("short", 90, now, epoch=2)
            order = ["new", "long", "short"]
        placed = coordinator.report(A, 1000, now)
        assert [name for name, _ in placed] == order


def test_without_a_known_speed_the_order_is_that_of_arrival() -> None:
    """A nonsensical speed counts as none, and without any speed requests stand in order of arrival."""
    for speed in (None, Speed((), (), 1.0), Speed((5, 1), (1.0, 2.0), 1.0), Speed((1,), (1.0,), 0.0)):
        coordinator = Coordinator()
        coordinator.up(A, speed)
        coordinator.place("long", 500)
        coordinator.place("short", 10)
        assert coordinator.report(A, 1000) == [("long", "worker-0"), ("short", "worker-0")]


def test_the_fastest_instance_says_what_a_prefill_takes() -> None:
    """Levels are counted in first quanta of the fastest instance, and when it leaves, in those of the next one."""
    coordinator = Coordinator(A)  # 300 tokens are three of its quanta, 100 are one
    coordinator.up(B, Speed((1,), (0.1,), 0.5))  # any number of tokens is less than one of its quanta
    coordinator.place("long", 300)
    coordinator.place("short", 100)
    assert list(coordinator.state.queue.order(0.0)) == ["long", "short"]
    coordinator.handle(PeerDown(B), 0.0)
    coordinator.place("long2", 300)
    coordinator.place("short2", 100)
    assert list(coordinator.state.queue.order(0.0)) == ["long", "short", "short2", "long2"]


def test_classes_come_before_levels() -> None:
    """A more urgent class, the lower number, goes before all others, however long its prompts."""
    coordinator = Coordinator(A)
    coordinator.report(A, 0)
    for name, num_tokens, priority in (("low", 10, 5), ("usual", 10, 0), ("urgent", 800, -1)):
        coordinator.place(name, num_tokens, priority=priority)
    assert [name for name, _ in coordinator.report(A, 1000)] == ["urgent", "usual", "low"]


def test_a_lower_class_keeps_its_share() -> None:
    """While an urgent class takes all the room, the other classes still get the minimum share of the turns."""
    coordinator = Coordinator(A, min_share=0.25, promote_after_s=float("inf"))
    coordinator.report(A, 0)
    for number in range(40):
        coordinator.place(f"urgent{number}", 100, priority=0)
        coordinator.place(f"low{number}", 100, priority=7)
    placed = [name for _ in range(40) for name, _ in coordinator.report(A, 100)]
    assert [name for name in placed if name.startswith("low")] == [f"low{number}" for number in range(9)]
    assert placed[3:9] == ["urgent3", "low0", "urgent4", "urgent5", "urgent6", "low1"]
    # The same holds if there is room for several requests at once.
    assert [name for name, _ in coordinator.report(A, 500)] == ["low9", *(f"urgent{i}" for i in (31, 32, 33)), "low10"]


def test_what_urgent_requests_leave_does_not_count_against_a_share() -> None:
    """If a lower class took room that no other request could use, its next turn is no later."""
    coordinator = Coordinator(A, min_share=0.25, promote_after_s=float("inf"))
    coordinator.report(A, 0)
    coordinator.place("huge", 1000, priority=0)
    coordinator.place("huge2", 1000, priority=7)
    for number in range(10):
        coordinator.place(f"low{number}", 50, priority=7)
        assert coordinator.report(A, 50) == [(f"low{number}", "worker-0")]
    for number in range(5):
        coordinator.place(f"urgent{number}", 100, priority=0)
        coordinator.place(f"next{number}", 100, priority=7)
    placed = [name for _ in range(5) for name, _ in coordinator.report(A, 100)]
    assert placed == ["urgent0", "urgent1", "urgent2", "urgent3", "next0"]


def test_an_owed_turn_reserves_an_instance_too() -> None:
    """If a lower class is owed a turn, an instance is reserved for its long request though urgent ones wait."""
    coordinator = Coordinator(A, min_share=0.25, promote_after_s=1.0)
    coordinator.report(A, 0)
    coordinator.place("long", 800, priority=7)
    for number in range(9):
        coordinator.place(f"urgent{number}", 100, 2.0, priority=0)
    placed = [name for _ in range(6) for name, _ in coordinator.report(A, 100, now=2.0)]
    assert placed == ["urgent0", "urgent1", "urgent2", "urgent3"]
    assert coordinator.reserved == {"worker-0": "long"}
    assert coordinator.report(A, 900, now=3.0) == [("long", "worker-0"), ("urgent4", "worker-0")]


def test_a_request_that_does_not_fit_lets_others_pass_for_a_while() -> None:
    """Until a long request has waited for its promotion, others pass it; after that an instance is reserved for it."""
    coordinator = Coordinator(A, promote_after_s=5.0)
    coordinator.report(A, 0)
    coordinator.place("long", 800)
    coordinator.place("s1", 800)
    coordinator.place("s2", 100)
    assert coordinator.report(A, 100, now=4.9) == [("s2", "worker-0")]
    assert coordinator.report(A, 0, now=5.0) == []
    coordinator.place("s3", 100, now=5.1)
    assert coordinator.report(A, 100, now=5.2) == []
    assert coordinator.reserved == {"worker-0": "long"}
    assert coordinator.place("s4", 50, now=5.3) == []
    assert coordinator.report(A, 790, now=6.0) == []
    # Now it is dispatched, and what it leaves is reserved for the next one, which has waited as long.
    assert coordinator.report(A, 950, now=7.0) == [("long", "worker-0")]
    assert coordinator.reserved == {"worker-0": "s1"}
    assert coordinator.report(A, 950, now=8.0) == [("s1", "worker-0"), ("s3", "worker-0"), ("s4", "worker-0")]
    assert coordinator.reserved == {}


def test_the_instance_with_the_most_room_is_reserved_and_others_go_on() -> None:
    """Only one instance is reserved for a long request; on others short ones pass it, or it goes there itself."""
    coordinator = Coordinator(A, B, promote_after_s=1.0)
    coordinator.report(A, 0)
    coordinator.report(B, 0)
    coordinator.place("long", 800)
    coordinator.place("s1", 300)
    assert coordinator.report(B, 100, now=1.0) == []
    assert coordinator.report(A, 400, now=1.0) == []
    assert coordinator.reserved == {"worker-0": "long"}
    assert coordinator.report(B, 300, now=2.0) == [("s1", "worker-1")]
    coordinator.place("s2", 200, now=2.0)
    # It goes to the other one after all, so the reserved instance is open to all requests.
    assert coordinator.report(B, 800, now=3.0) == [("long", "worker-1"), ("s2", "worker-0")]


def test_one_instance_in_sixteen_of_a_kind_is_reserved() -> None:
    """However many long requests are overdue, most of a large fleet stays open to short ones."""
    workers = [Peer(f"worker-{number}", 1) for number in range(40)]
    coordinator = Coordinator(*workers, promote_after_s=1.0)
    for worker in workers:
        coordinator.report(worker, 100)
    for number in range(5):
        coordinator.place(f"long{number}", 800)
    coordinator.place("short", 50, now=2.0)
    assert sorted(coordinator.reserved.values()) == ["long0", "long1"]


def test_what_a_long_request_leaves_is_for_requests_before_it_too() -> None:
    """When a reservation ends, the room goes to the first request that fits, even one that stood before."""
    coordinator = Coordinator(A, promote_after_s=1.0)
    coordinator.report(A, 0)
    coordinator.place("long", 800)
    coordinator.place("young", 100, now=0.9)
    coordinator.place("tiny", 50, now=0.9)
    assert coordinator.report(A, 60, now=1.0) == [("tiny", "worker-0")]
    coordinator.place("tiny2", 50, now=1.1)
    assert coordinator.report(A, 60, now=1.2) == []
    assert coordinator.reserved == {"worker-0": "long"}
    assert list(coordinator.state.queue.order(1.2)) == ["young", "long", "tiny2"]
    placed = coordinator.report(A, 1000, now=1.3)
    assert placed == [("long", "worker-0"), ("young", "worker-0"), ("tiny2", "worker-0")]


@pytest.mark.parametrize(("num_instances", "num_reserved"), [(15, 0), (16, 1)])
def test_a_large_fleet_makes_room_for_the_first_request_at_once(num_instances: int, num_reserved: int) -> None:
    """In a large fleet the next round reserves an instance for the first waiting request, though it is not overdue."""
    workers = [Peer(f"worker-{number}", 1) for number in range(num_instances)]
    coordinator = Coordinator(*workers, promote_after_s=100.0, migration=PairingConfig())
    for worker in workers:
        coordinator.report(worker, 100)
    for number in range(3):
        coordinator.place(f"long{number}", 800)
    assert coordinator.reserved == {}
    coordinator.handle(Tick(), 1.0)
    assert list(coordinator.reserved.values()) == ["long0"][:num_reserved]


def test_an_instance_without_any_room_is_not_reserved() -> None:
    """An instance with a full queue is not reserved, nor one that the long request never fits."""
    coordinator = Coordinator(A, B, promote_after_s=1.0)
    coordinator.report(A, 1000, waiting=64)
    coordinator.report(B, 0, kv_total_bytes=500)
    coordinator.place("long", 800)
    coordinator.place("short", 100, now=2.0)
    assert coordinator.report(B, 500, now=2.0, kv_total_bytes=500, kv_needed_bytes=0) == [("short", "worker-1")]
    assert coordinator.reserved == {}


def test_only_an_instance_of_its_kind_is_reserved() -> None:
    """For a request that waits for its kind no instance of another kind is reserved, however much room that has."""
    coordinator = Coordinator(A, promote_after_s=1.0)
    coordinator.up(B, kind="other")
    coordinator.report(A, 0)
    coordinator.report(B, 0)
    coordinator.handle(Place("mine", 2, 800, kind="k"), 0.0, GATEWAY)
    coordinator.place("short", 300)
    assert coordinator.report(B, 900, now=1.0) == [("short", "worker-1")]
    assert coordinator.reserved == {"worker-0": "mine"}


def test_a_reservation_ends_with_its_reason() -> None:
    """No instance stays reserved for a request that left, and none that is gone or can no longer hold the request."""

    def reserving() -> Coordinator:
        coordinator = Coordinator(A, B, promote_after_s=1.0)
        for peer in (A, B):
            coordinator.report(peer, 0)
        coordinator.place("long", 800)
        coordinator.place("short", 300)
        assert coordinator.report(A, 200, now=1.0) == []
        assert coordinator.report(A, 400, now=1.0) == []
        assert coordinator.reserved == {"worker-0": "long"}
        return coordinator

    coordinator = reserving()
    assert placements(coordinator.handle(Unplace("long", 1), 1.0, GATEWAY)) == [("short", "worker-0")]
    assert coordinator.reserved == {}
    coordinator = reserving()
    assert coordinator.report(A, 400, 1.0, kv_total_bytes=790, kv_needed_bytes=390) == [("short", "worker-0")]
    coordinator = reserving()
    coordinator.handle(PeerDown(A), 1.0)
    assert coordinator.reserved == {}
    coordinator = reserving()
    coordinator.report(A, 400, 1.0, draining=True)
    assert coordinator.reserved == {}
    coordinator = reserving()
    avoiding = Place("long", 1, 800, avoid=A)
    assert placements(coordinator.handle(avoiding, 1.0, GATEWAY)) == [("short", "worker-0")]


def test_a_silent_instance_is_not_reserved() -> None:
    """When a reserved instance stops reporting, its reservation ends, and another may be reserved."""
    coordinator = Coordinator(A, B, promote_after_s=1.0, report_ttl_s=2.0)
    coordinator.report(A, 0)
    coordinator.place("long", 800)
    coordinator.place("short", 300)
    assert coordinator.report(A, 400, now=1.0) == []
    assert coordinator.reserved == {"worker-0": "long"}
    assert coordinator.report(B, 100, now=3.0) == []
    assert coordinator.reserved == {}
    assert coordinator.report(B, 400, now=3.5) == []
    assert coordinator.reserved == {"worker-1": "long"}


def test_no_reservation_holds_against_a_more_urgent_class() -> None:
    """A new request goes before all of lower classes, even if an instance is reserved for one of these."""
    coordinator = Coordinator(A, promote_after_s=1.0)
    coordinator.report(A, 0)
    coordinator.place("long", 800, priority=5)
    coordinator.place("short", 300, priority=5)
    assert coordinator.report(A, 400, now=1.0) == []
    assert coordinator.reserved == {"worker-0": "long"}
    assert placements(coordinator.place("urgent", 300, now=2.0)) == [("urgent", "worker-0")]
    # While a more urgent request waits, no instance is reserved for the long one.
    coordinator.place("urgent2", 900, now=2.0)
    assert coordinator.report(A, 300, now=2.5) == [("short", "worker-0")]


def test_long_requests_do_not_starve() -> None:
    """However many short requests come, none that came after a long one's promotion passes it."""
    coordinator = Coordinator(A, promote_after_s=0.3)
    running: dict[str, tuple[int, int]] = {}  # tokens, and the turn in which it ends
    order: list[str] = []
    coordinator.report(A, 1000)
    for turn in range(100):
        now = turn / 10
        found = placements(coordinator.place(f"s{turn}", 300, now))
        if turn == 10:
            found += placements(coordinator.place("long", 1000, now))
        running = {name: (size, end) for name, (size, end) in running.items() if end > turn}
        found += coordinator.report(A, 1000 - sum(num_tokens for num_tokens, _ in running.values()), now)
        for name, _ in found:
            running[name] = (1000 if name == "long" else 300, turn + 10)
            order.append(name)
    before = order[: order.index("long")]
    assert max(int(name[1:]) for name in before) <= 13
    assert len(order) > len(before) + 10


def test_a_full_queue_refuses_and_says_when_it_will_be_shorter() -> None:
    """Past the bound a request is refused, until the waiting requests will have left at the present pace."""
    coordinator = Coordinator(A)
    coordinator.report(A, 0)
    for number in range(100):
        coordinator.place(f"r{number}", 100, now=10.0)

    def retry_after_s(now: float) -> float:
        (effect,) = coordinator.place("late", 100, now)
        assert isinstance(effect, Send)
        assert isinstance(effect.message, Refused)
        assert effect.message.reason is RefusalReason.OVERLOADED
        return effect.message.retry_after_s

    assert retry_after_s(10.0) == 1.0  # nothing is known yet, so the time is that between repeated messages
    for second in range(11, 31):  # four requests a second leave, and four others come
        for number in range(4):
            assert coordinator.report(A, 100, float(second))
            coordinator.place(f"n{second}-{number}", 100, float(second))
    assert 23.0 <= retry_after_s(30.0) <= 27.0
    assert retry_after_s(40.0) > 30.0  # no request has left since
    assert retry_after_s(1000.0) == 60.0


def test_a_new_queue_is_judged_by_itself() -> None:
    """How slowly an earlier queue moved says nothing about one that has just formed."""
    coordinator = Coordinator(A)
    coordinator.report(A, 0)
    coordinator.place("r", 100, now=0.0)
    assert coordinator.report(A, 100, now=500.0) == [("r", "worker-0")]
    for number in range(101):
        effects = coordinator.place(f"n{number}", 100, now=1000.0)
    assert effects == [Send(GATEWAY, Refused("n100", 1, RefusalReason.OVERLOADED, 1.0))]


def test_a_full_queue_still_lets_pass_what_an_instance_admits() -> None:
    """The bound is for requests that would have to wait."""
    coordinator = Coordinator(A)
    coordinator.report(A, 50)
    for number in range(100):
        assert coordinator.place(f"r{number}", 100) == []
    assert placements(coordinator.place("short", 50)) == [("short", "worker-0")]


def test_new_requests_do_not_pass_an_overdue_one_for_ever() -> None:
    """If a new request that fits at once would pass a request that has waited for its promotion, it waits instead."""
    coordinator = Coordinator(A, promote_after_s=1.0)
    coordinator.report(A, 400)
    assert coordinator.place("long", 800) == []
    assert placements(coordinator.place("s1", 100, now=0.9)) == [("s1", "worker-0")]
    assert coordinator.place("s2", 100, now=1.0) == []
    assert coordinator.reserved == {"worker-0": "long"}


def num_calls(num_instances: int, num_waiting: int, now: float) -> int:
    """The calls in Python and C that one load report costs while requests wait for a kind of instance that is full.

    Half of the instances are of that kind, and the others have room for any of the requests. So has one of that kind,
    which the requests avoid.
    """
    coordinator, idle = Coordinator(), Peer("idle", 1)
    coordinator.up(idle, kind="old")
    coordinator.report(idle, 1000)
    workers = [Peer(f"worker-{number}", 1) for number in range(num_instances)]
    for number, peer in enumerate(workers):
        coordinator.up(peer, kind="new" if number % 2 else "old")
        coordinator.report(peer, 500 if number % 2 else 0)
    for number in range(num_waiting):
        place = Place(f"r{number}", 2, 100 + number % 300, kind="old", avoid=idle)
        assert coordinator.state.handle(place, 0.0, GATEWAY) == []
    load = LoadReport(10**6, 1, 0, 1000, 490, 490, 10, 10, 0, kv_needed_bytes=490)
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        assert coordinator.state.handle(load, now, workers[1]) == []
    finally:
        sys.setprofile(None)
    return calls


def test_a_report_costs_no_more_with_a_longer_line_and_more_instances() -> None:
    """While requests wait for a kind of instance that is full, a report of another kind costs a constant number of
    calls, before and after the requests are due for promotion.
    """
    for now in (0.1, 10.0):
        assert num_calls(num_instances=40, num_waiting=90, now=now) <= num_calls(4, 3, now) + 4 < 200


@pytest.mark.interpreted("calls are counted by a patched class, which compiled code does not look at")
@pytest.mark.parametrize(("now", "num_reserved"), [(0.5, 0), (5.0, 2)], ids=["before promotion", "overdue"])
def test_what_many_requests_need_is_looked_for_once(
    now: float, num_reserved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a report has room for the last request in the line only, instances are looked for once for all requests before
    it, which need the same; and instances to reserve until none is left.
    """
    coordinator = Coordinator(A, promote_after_s=1.0)
    coordinator.report(A, 0)
    coordinator.up(B, kind="other")
    for number in range(50):
        assert coordinator.handle(Place(f"r{number}", 2, 90, kind="k"), 0.0, GATEWAY) == []
    assert coordinator.handle(Place("short", 2, 50), 0.0, GATEWAY) == []
    calls: Counter[str] = Counter()
    for name in ("choose", "reserve_for"):
        found = getattr(Fleet, name)

        def counted(
            fleet: Fleet, place: Place, name: str = name, found: Callable[..., Any] = found, **options: Any
        ) -> Any:
            calls[name] += 1
            return found(fleet, place, **options)

        monkeypatch.setattr(Fleet, name, counted)
    assert coordinator.report(B, 60, now=now) == [("short", "worker-1")]
    assert calls["choose"] == 2
    assert calls["reserve_for"] == num_reserved
