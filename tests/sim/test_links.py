"""Links between machines: copies that are made in turn, that share the bandwidth, or that do not know of each other."""

from typing import Any, cast

import pytest
from hypothesis import given, settings, strategies as st

from actorserve.core.effects import Fetch
from actorserve.core.messages import CopyDone, KVAccess
from actorserve.core.timing.profile import Link
from actorserve.sim.cluster_table import LinksTable
from actorserve.sim.links.links import Links, make_links
from actorserve.sim.simulated_process import Process
from actorserve.sim.timeline import Timeline
from tests.sim.machines import BLOCK_S, LATENCY_S, machine
from tests.sim.profiles import PROFILE
from tests.sim.runs import MOVING, run
from tools.simulation.experiment import merged


class Copies:
    """Copies between machines on a timeline. Each is known by its number."""

    def __init__(self, rule: str) -> None:
        self.timeline = Timeline()
        self.done_s: dict[int, float] = {}
        self.took_s: dict[int, float] = {}
        table = LinksTable.model_validate({"rule": rule})
        self.links: Links = make_links(table, self.timeline, self._on_done)

    def copy(
        self, number: int, at_s: float, source: Process, to: Process, num_blocks: int = 1, *, is_urgent: bool = False
    ) -> None:
        ticket = cast("Any", None)
        access = KVAccess("simulated", source.peer.name)
        fetch = Fetch(number, source.peer, access, ticket, 0, tuple(range(num_blocks)), is_urgent=is_urgent)
        self.timeline.at(at_s, self.links.begin, fetch, source, to)

    def run(self) -> list[float]:
        """When each of the copies was done."""
        while self.timeline.next_s is not None:
            self.timeline.run_next()
        return [self.done_s[number] for number in sorted(self.done_s)]

    def _on_done(self, destination: Process, source: Process, done: CopyDone) -> None:
        assert done.copy_id not in self.done_s
        self.done_s[done.copy_id] = self.timeline.now
        self.took_s[done.copy_id] = done.duration_s


@pytest.mark.parametrize("rule", ["in_turn", "shared", "apart"])
def test_a_copy_alone_takes_the_link_s_time(rule: str) -> None:
    """A copy that meets no others takes the latency and its bytes over the bandwidth, by each rule."""
    copies, one, two = Copies(rule), machine("one"), machine("two")
    copies.copy(1, 5.0, one, two, 3)
    copies.copy(2, 9.0, two, one, 0)
    assert copies.run() == [pytest.approx(5.0 + LATENCY_S + 3 * BLOCK_S), 9.0]
    assert copies.took_s == {1: pytest.approx(LATENCY_S + 3 * BLOCK_S), 2: 0.0}


@pytest.mark.parametrize("is_out", [True, False])
def test_copies_share_a_machine_s_bandwidth(is_out: bool) -> None:
    """Copies out of one machine, or into one, halve each other's rate while both last; one that ends gives it back."""
    copies, hub, ends = Copies("shared"), machine("hub"), [machine("one"), machine("two")]
    for number, num_blocks in enumerate((1, 3)):
        source, to = (hub, ends[number]) if is_out else (ends[number], hub)
        copies.copy(number, 0.0, source, to, num_blocks)
    # The short copy moves at half the rate; the long one has moved one block by then.
    assert copies.run() == [pytest.approx(LATENCY_S + 2 * BLOCK_S), pytest.approx(LATENCY_S + 4 * BLOCK_S)]


def test_a_copy_that_comes_later_takes_its_share_from_then_on() -> None:
    """A second copy slows the first one down from when it begins, and not before."""
    copies, one, two, other = Copies("shared"), machine("one"), machine("two"), machine("other")
    copies.copy(1, 0.0, one, two, 2)
    copies.copy(2, BLOCK_S, one, other, 2)
    assert copies.run() == [pytest.approx(LATENCY_S + 3 * BLOCK_S), pytest.approx(LATENCY_S + 4 * BLOCK_S)]


def test_both_directions_have_the_whole_bandwidth() -> None:
    """Copies from one machine and to it do not slow each other down, and machines without a common end neither."""
    copies, ends = Copies("shared"), [machine(str(number)) for number in range(4)]
    for number, (source, to) in enumerate([(0, 1), (1, 0), (2, 3)]):
        copies.copy(number, 0.0, ends[source], ends[to], 2)
    assert copies.run() == [pytest.approx(LATENCY_S + 2 * BLOCK_S)] * 3


def test_an_urgent_copy_goes_first() -> None:
    """While an urgent copy lasts, others at its machines stand still; two urgent ones share."""
    copies, one, two, other = Copies("shared"), machine("one"), machine("two"), machine("other")
    copies.copy(1, 0.0, one, two, 2)
    copies.copy(2, BLOCK_S, one, other, 1, is_urgent=True)
    copies.copy(3, BLOCK_S, other, two, 1, is_urgent=True)
    assert copies.run() == [
        pytest.approx(LATENCY_S + 3 * BLOCK_S),
        pytest.approx(LATENCY_S + 2 * BLOCK_S),
        pytest.approx(LATENCY_S + 2 * BLOCK_S),
    ]


def test_a_pace_bounds_copies_from_one_source() -> None:
    """Copies from one machine to another share the pace; an urgent copy and one from elsewhere are not held back."""
    copies, one, other = Copies("shared"), machine("one"), machine("other")
    two = machine("two", bytes_per_s=1000.0)
    copies.copy(1, 0.0, one, two)
    copies.copy(2, 0.0, one, two)
    assert copies.run() == [pytest.approx(LATENCY_S + 8.0)] * 2
    copies.copy(3, 100.0, one, two, is_urgent=True)
    copies.copy(4, 200.0, other, two)
    assert copies.run()[2:] == [pytest.approx(100.0 + LATENCY_S + BLOCK_S), pytest.approx(200.0 + LATENCY_S + 4.0)]


def test_copies_apart_do_not_know_of_each_other() -> None:
    """Without contention all copies take their time alone, however many share a machine."""
    copies, one, two = Copies("apart"), machine("one"), machine("two")
    for number in range(5):
        copies.copy(number, 0.0, one, two)
    assert copies.run() == [pytest.approx(LATENCY_S + BLOCK_S)] * 5


Draw = tuple[float, int, int, int, bool]


@given(
    st.lists(
        st.tuples(st.floats(0.0, 3.0), st.integers(0, 3), st.integers(1, 3), st.integers(1, 9), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
@settings(deadline=None, max_examples=60)
def test_shared_links_lose_no_byte_and_gain_none(draws: list[Draw]) -> None:
    """Each copy ends once, none is faster than alone, and no machine moves more than its bandwidth in a direction."""
    copies, ends = Copies("shared"), [machine(str(number)) for number in range(4)]
    alone = Copies("apart")
    for number, (at_s, source, step, num_blocks, is_urgent) in enumerate(draws):
        to = (source + step) % 4
        for group in (copies, alone):
            group.copy(number, at_s, ends[source], ends[to], num_blocks, is_urgent=is_urgent)
    for shared_s, alone_s in zip(copies.run(), alone.run(), strict=True):
        assert shared_s >= alone_s - 1e-9
    for place in range(4):
        for of_machine in (
            [number for number, draw in enumerate(draws) if draw[1] == place],
            [number for number, draw in enumerate(draws) if (draw[1] + draw[2]) % 4 == place],
        ):
            if of_machine:
                lasted_s = max(copies.done_s[number] for number in of_machine) - min(
                    draws[number][0] for number in of_machine
                )
                assert lasted_s >= LATENCY_S + BLOCK_S * sum(draws[number][3] for number in of_machine) - 1e-9


@pytest.mark.parametrize("rule", ["shared", "apart"])
@pytest.mark.parametrize("slowdown", [0.0, 0.5])
def test_requests_move_over_each_kind_of_link(rule: str, slowdown: float) -> None:
    """With each rule requests migrate, all complete, and equal runs are equal; an instance's death is survived."""
    cluster = {"links": {"rule": rule}, "copy_slowdown": slowdown}
    failures = [{"process": "worker-1", "at_s": 20.0, "restart_at_s": 25.0}]
    changes = merged(MOVING, {"cluster": cluster, "failures": failures})
    figures, again = run(changes).figures(), run(changes).figures()
    assert figures == again
    assert figures["requests"]["completed"] == 150
    assert figures["migration"]["migrated"] > 0


def test_a_bandwidth_replaces_the_profile_s() -> None:
    """``links.bytes_per_s`` replaces the profile's bandwidth, and not its latency; requests then move as with it."""
    assert LinksTable(bytes_per_s=2e3).applied_to(PROFILE).transfer == Link(LATENCY_S, 2e3)
    assert LinksTable().applied_to(PROFILE) == PROFILE
    usual, same, slow = (
        run(merged(MOVING, {"cluster": {"links": links}})).figures()
        for links in ({}, {"bytes_per_s": 1e4}, {"bytes_per_s": 4e3})
    )
    assert usual == same != slow
