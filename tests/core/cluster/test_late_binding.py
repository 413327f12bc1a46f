"""Late binding: who waits in the cluster, in which order they get what comes free, and who is refused."""

from actorserve.core.effects import Send
from actorserve.core.messages import (
    LoadReport,
    PeerDown,
    Place,
    Placed,
    RefusalReason,
    Refused,
    Speed,
    Unplace,
)
from tests.core.harness.coordinator import A, B, Coordinator, placements
from tests.core.harness.fleets import GATEWAY


def test_a_request_goes_at_once_where_it_fits_and_else_waits() -> None:
    """While some instance admits it, a request goes to the freest that does; else it waits until one reports room."""
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
    """What started requests leave free in device and host memory together takes another prompt."""
    coordinator = Coordinator(A)
    coordinator.report(A, -500, host_total_bytes=600)
    assert placements(coordinator.place("r1", 101)) == []
    assert placements(coordinator.place("r2", 100)) == [("r2", "worker-0")]


def test_a_full_queue_admits_nobody() -> None:
    """An instance where as many wait as may, those under way included, gets more only when its queue is shorter."""
    coordinator = Coordinator(A, max_queue_per_instance=3)
    coordinator.report(A, 1000, waiting=1)
    assert [bool(placements(coordinator.place(f"r{i}", 10))) for i in range(4)] == [True, True, False, False]
    assert coordinator.report(A, 1000, waiting=3) == []
    assert coordinator.report(A, 1000, waiting=2) == [("r2", "worker-0")]


def test_short_prompts_come_first_until_long_ones_are_promoted() -> None:
    """Who waits stands by the level of its prefill time, and in the first level from its promotion on."""
    for now, order in ((1.0, ["short", "new", "long"]), (5.0, ["long", "short", "new"])):
        coordinator = Coordinator(A, promote_after_s=5.0)
        coordinator.report(A, 0)
        coordinator.place("long", 300, 0.0)
        coordinator.place("short", 90, 0.5)
        coordinator.place("new", 100, 1.0)
        # The promoted goes to the back of the first level, before those that are promoted after it.
        if now == 5.0:
            coordinator.handle(Unplace("nobody", 1), now)
            coordinator.report(A, 90, now)
            coordinator.report(A, 0, now)
            coordinator.place("short", 90, now, epoch=2)
            order = ["new", "long", "short"]
        placed = coordinator.report(A, 1000, now)
        assert [name for name, _ in placed] == order


def test_without_a_known_speed_who_came_first_is_first() -> None:
    """Nonsense about its speed is no speed: an instance that has none leaves the requests in order of arrival."""
    for speed in (None, Speed((), (), 1.0), Speed((5, 1), (1.0, 2.0), 1.0), Speed((1,), (1.0,), 0.0)):
        coordinator = Coordinator()
        coordinator.up(A, speed)
        coordinator.place("long", 500)
        coordinator.place("short", 10)
        assert coordinator.report(A, 1000) == [("long", "worker-0"), ("short", "worker-0")]


def test_the_fastest_instance_says_what_a_prefill_takes() -> None:
    """Levels are counted in the first quanta of the fastest instance that is there; when it leaves, of the next."""
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
    """While an urgent class takes all the room, the others together still get the minimum share of the turns."""
    coordinator = Coordinator(A, min_share=0.25, promote_after_s=float("inf"))
    coordinator.report(A, 0)
    for number in range(40):
        coordinator.place(f"urgent{number}", 100, priority=0)
        coordinator.place(f"low{number}", 100, priority=7)
    placed = [name for _ in range(40) for name, _ in coordinator.report(A, 100)]
    assert [name for name in placed if name.startswith("low")] == [f"low{number}" for number in range(9)]
    assert placed[3:9] == ["urgent3", "low0", "urgent4", "urgent5", "urgent6", "low1"]
    # The same where there is room for several at once.
    assert [name for name, _ in coordinator.report(A, 500)] == ["low9", *(f"urgent{i}" for i in (31, 32, 33)), "low10"]


def test_what_urgent_requests_leave_does_not_count_against_a_share() -> None:
    """A lower class that took room which nobody else could use has its next turn as soon as if it had not."""
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


def test_a_turn_that_is_owed_is_kept_too() -> None:
    """Where a turn is owed to a lower class, a long request of it has an instance kept though urgent ones wait."""
    coordinator = Coordinator(A, min_share=0.25, promote_after_s=1.0)
    coordinator.report(A, 0)
    coordinator.place("long", 800, priority=7)
    for number in range(9):
        coordinator.place(f"urgent{number}", 100, 2.0, priority=0)
    placed = [name for _ in range(6) for name, _ in coordinator.report(A, 100, now=2.0)]
    assert placed == ["urgent0", "urgent1", "urgent2", "urgent3"]
    assert coordinator.reserved == {"worker-0": "long"}
    assert coordinator.report(A, 900, now=3.0) == [("long", "worker-0"), ("urgent4", "worker-0")]


def test_one_that_does_not_fit_lets_others_pass_for_a_while() -> None:
    """Until it has waited for its promotion a long request is passed by those behind it; then its room is kept."""
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
    # Now it is its turn, and what it leaves is kept for the next, which has waited as long.
    assert coordinator.report(A, 950, now=7.0) == [("long", "worker-0")]
    assert coordinator.reserved == {"worker-0": "s1"}
    assert coordinator.report(A, 950, now=8.0) == [("s1", "worker-0"), ("s3", "worker-0"), ("s4", "worker-0")]
    assert coordinator.reserved == {}


def test_the_instance_with_the_most_room_is_kept_and_others_go_on() -> None:
    """Only one instance is kept for a long request; elsewhere short ones pass it, and it may go elsewhere itself."""
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
    # It goes to the other after all: what was kept for it is there for everybody.
    assert coordinator.report(B, 800, now=3.0) == [("long", "worker-1"), ("s2", "worker-0")]


def test_what_a_long_request_leaves_is_for_those_before_it_too() -> None:
    """When an instance is no longer kept, its room goes to the first who fits, also to one that stood before."""
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


def test_an_instance_without_any_room_is_not_kept() -> None:
    """Where the queue is full nobody could pass, so nothing is kept there; and not where the long one never fits."""
    coordinator = Coordinator(A, B, promote_after_s=1.0)
    coordinator.report(A, 1000, waiting=64)
    coordinator.report(B, 0, kv_total_bytes=500)
    coordinator.place("long", 800)
    coordinator.place("short", 100, now=2.0)
    assert coordinator.report(B, 500, now=2.0, kv_total_bytes=500, kv_needed_bytes=0) == [("short", "worker-1")]
    assert coordinator.reserved == {}


def test_only_an_instance_of_its_kind_is_kept() -> None:
    """For a request that waits for its kind no instance of another kind is kept, however much room that has."""
    coordinator = Coordinator(A, promote_after_s=1.0)
    coordinator.up(B, kind="other")
    coordinator.report(A, 0)
    coordinator.report(B, 0)
    coordinator.handle(Place("mine", 2, 800, kind="k"), 0.0, GATEWAY)
    coordinator.place("short", 300)
    assert coordinator.report(B, 900, now=1.0) == [("short", "worker-1")]
    assert coordinator.reserved == {"worker-0": "mine"}


def test_what_was_kept_is_given_up_with_its_reason() -> None:
    """Nothing stays kept for a request that left, or on an instance that can hold it no more, or that is gone."""

    def keeping() -> Coordinator:
        coordinator = Coordinator(A, B, promote_after_s=1.0)
        for peer in (A, B):
            coordinator.report(peer, 0)
        coordinator.place("long", 800)
        coordinator.place("short", 300)
        assert coordinator.report(A, 200, now=1.0) == []
        assert coordinator.report(A, 400, now=1.0) == []
        assert coordinator.reserved == {"worker-0": "long"}
        return coordinator

    coordinator = keeping()
    assert placements(coordinator.handle(Unplace("long", 1), 1.0, GATEWAY)) == [("short", "worker-0")]
    assert coordinator.reserved == {}
    coordinator = keeping()
    assert coordinator.report(A, 400, 1.0, kv_total_bytes=790, kv_needed_bytes=390) == [("short", "worker-0")]
    coordinator = keeping()
    coordinator.handle(PeerDown(A), 1.0)
    assert coordinator.reserved == {}
    coordinator = keeping()
    coordinator.report(A, 400, 1.0, draining=True)
    assert coordinator.reserved == {}
    coordinator = keeping()
    avoiding = Place("long", 1, 800, avoid=A)
    assert placements(coordinator.handle(avoiding, 1.0, GATEWAY)) == [("short", "worker-0")]


def test_nothing_is_kept_on_an_instance_that_is_silent() -> None:
    """When an instance that is kept reports no more, it is given up, and another may be kept."""
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


def test_nothing_is_kept_from_a_more_urgent_class() -> None:
    """A request that comes goes before all of lower classes, also where an instance is kept for one of these."""
    coordinator = Coordinator(A, promote_after_s=1.0)
    coordinator.report(A, 0)
    coordinator.place("long", 800, priority=5)
    coordinator.place("short", 300, priority=5)
    assert coordinator.report(A, 400, now=1.0) == []
    assert coordinator.reserved == {"worker-0": "long"}
    assert placements(coordinator.place("urgent", 300, now=2.0)) == [("urgent", "worker-0")]
    # While more urgent ones wait nothing is kept for it, either.
    coordinator.place("urgent2", 900, now=2.0)
    assert coordinator.report(A, 300, now=2.5) == [("short", "worker-0")]


def test_long_requests_do_not_starve() -> None:
    """However many short requests come for what is free, none that came after a long one's promotion passes it."""
    coordinator = Coordinator(A, promote_after_s=0.3)
    running: dict[str, tuple[int, int]] = {}  # tokens, and the turn in which it ends
    order: list[str] = []
    coordinator.report(A, 1000)
    for turn in range(100):
        now = turn / 10
        found = placements(coordinator.place(f"s{turn}", 300, now))
        if turn == 10:
            found += placements(coordinator.place("long", 1000, now))
        running = {name: each for name, each in running.items() if each[1] > turn}
        found += coordinator.report(A, 1000 - sum(num_tokens for num_tokens, _ in running.values()), now)
        for name, _ in found:
            running[name] = (1000 if name == "long" else 300, turn + 10)
            order.append(name)
    before = order[: order.index("long")]
    assert max(int(name[1:]) for name in before) <= 13
    assert len(order) > len(before) + 10


def test_a_full_line_refuses_and_says_when_it_will_be_shorter() -> None:
    """Past the bound a request is refused; it may come back when those who wait will be gone, at the present pace."""
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

    assert retry_after_s(10.0) == 1.0  # nothing is known yet: as soon as any question is repeated
    for second in range(11, 31):  # four a second leave, and others come for them
        for number in range(4):
            assert coordinator.report(A, 100, float(second))
            coordinator.place(f"n{second}-{number}", 100, float(second))
    assert 23.0 <= retry_after_s(30.0) <= 27.0
    assert retry_after_s(40.0) > 30.0  # nobody left since
    assert retry_after_s(1000.0) == 60.0


def test_a_new_line_is_judged_by_itself() -> None:
    """How slowly an earlier line went says nothing about one that has just formed."""
    coordinator = Coordinator(A)
    coordinator.report(A, 0)
    coordinator.place("r", 100, now=0.0)
    assert coordinator.report(A, 100, now=500.0) == [("r", "worker-0")]
    for number in range(101):
        effects = coordinator.place(f"n{number}", 100, now=1000.0)
    assert effects == [Send(GATEWAY, Refused("n100", 1, RefusalReason.OVERLOADED, 1.0))]


def test_a_full_line_still_lets_pass_whom_an_instance_admits() -> None:
    """The bound is for those who would have to wait."""
    coordinator = Coordinator(A)
    coordinator.report(A, 50)
    for number in range(100):
        assert coordinator.place(f"r{number}", 100) == []
    assert placements(coordinator.place("short", 50)) == [("short", "worker-0")]
