"""Simulated copies of KV that an iteration still writes, and what a handoff costs with them."""

from dataclasses import replace

import pytest

from actorserve.core.effects import Fetch
from actorserve.core.kv.tickets import make_ticket
from actorserve.core.messages import CopyDone, KVAccess, TransferId, TransferKind
from actorserve.sim.cluster_table import LinksTable
from actorserve.sim.links.following import FollowingCopies
from actorserve.sim.links.links import make_links
from actorserve.sim.simulated_process import Process
from actorserve.sim.timeline import Timeline
from tests.sim.machines import BLOCK_S, LATENCY_S, machine
from tests.sim.profiles import PROFILE

NUM_LAYERS = 4
STEP, ENDS_S, DURATION_S = 3, 10.0, 8.0  # the iteration in flight
LAYER_S = DURATION_S / NUM_LAYERS


class Source(Process):
    """A machine with an iteration in flight, of a model with four layers."""

    def step_in_flight(self, step_id: int) -> tuple[float, float] | None:
        return (ENDS_S, DURATION_S) if step_id == STEP else None


def make_source() -> Process:
    made = machine("source", profile=replace(PROFILE, num_layers=NUM_LAYERS))
    return Source(made.peer, made.role, made.core, made.engine)


def copied_s(num_blocks: int, at_s: float, step_id: int = STEP, *, by_layer: bool, rule: str) -> float:
    """When such a copy is done."""
    timeline = Timeline()
    done_s: list[float] = []

    def on_done(destination: Process, source: Process, done: CopyDone) -> None:
        assert (destination, done.copy_id) == (there, 1)
        assert done.duration_s == pytest.approx(timeline.now - at_s)
        done_s.append(timeline.now)

    table = LinksTable.model_validate({"rule": rule})
    links = FollowingCopies(timeline, lambda copied: make_links(table, timeline, copied), on_done)
    source, there = make_source(), machine("there")
    blocks = tuple(range(num_blocks))
    transfer = TransferId(TransferKind.MIGRATION, 1)
    ticket = make_ticket(b"key", transfer, 0, blocks, on_host=False, step_id=step_id, by_layer=by_layer)
    access = KVAccess("simulated", "source")
    timeline.at(at_s, links.begin, Fetch(1, source.peer, access, ticket, 0, blocks, is_urgent=True), source, there)
    while timeline.next_s is not None:
        timeline.run_next()
    [at] = done_s
    return at


@pytest.mark.parametrize("rule", ["in_turn", "shared", "apart"])
def test_a_copy_follows_its_iteration(rule: str) -> None:
    """In one piece a copy begins when the last layer's KV is written, a layer's time before the iteration's end. Layer
    by layer only the last layer's copy is left then, unless the link is too slow.
    """
    last_s = ENDS_S - LAYER_S
    of_layer_s = LATENCY_S + 4 * BLOCK_S / NUM_LAYERS
    whole = copied_s(4, 3.0, by_layer=False, rule=rule)
    assert whole == pytest.approx(last_s + LATENCY_S + 4 * BLOCK_S)
    assert copied_s(4, 3.0, by_layer=True, rule=rule) == pytest.approx(last_s + of_layer_s)
    slow = 3.0 + 2 * LATENCY_S + 40 * BLOCK_S
    assert copied_s(40, 3.0, by_layer=True, rule=rule) == pytest.approx(slow)
    late = last_s + 1.0
    assert copied_s(4, late, by_layer=False, rule=rule) == pytest.approx(late + LATENCY_S + 4 * BLOCK_S)


@pytest.mark.parametrize("by_layer", [False, True])
def test_an_iteration_that_has_ended_is_not_followed(by_layer: bool) -> None:
    """The copy begins at once, as one."""
    at_s = copied_s(4, 3.0, STEP + 1, by_layer=by_layer, rule="shared")
    assert at_s == pytest.approx(3.0 + LATENCY_S + 4 * BLOCK_S)
