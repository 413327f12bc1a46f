"""Scenarios of a migration's source: which requests leave, when they are paused, and how those that stay go on."""

from dataclasses import replace

import pytest

from actorserve.core.effects import DropFromEngine, Fetch, Meet, RunStep, Send
from actorserve.core.gateway.state import GatewayState
from actorserve.core.messages import (
    Copied,
    CopyDone,
    Declined,
    DeclineReason,
    Keep,
    LoadReport,
    Message,
    MigrateTo,
    Offer,
    PeerDown,
    PeerUp,
    Release,
    Role,
    Stage,
    Start,
    Tick,
    Transfer,
    Withdrawn,
)
from actorserve.core.migration.config import MigrationMode
from actorserve.core.timing.profile import Link
from actorserve.core.timing.step_times import StepTimes
from tests.core.harness.driver import GATEWAY, PROFILE, Instance, migration_id, spec
from tests.core.harness.source import (
    COORDINATOR,
    INFO,
    SOURCE,
    D,
    E,
    assert_goes_on,
    assert_holds_nothing,
    at,
    chosen,
    decoding,
    hand_over,
    order,
    request_of,
    short_of_memory,
    source,
    ticket,
    told,
)
from tests.core.world.world import Scheduling, World

# --- migrations without failures ----------------------------------------------------------------------------


def test_the_stages_of_a_live_migration() -> None:
    """Full blocks are copied while the request decodes, the rest while it is paused; then its gateway is asked."""
    instance = source()
    decoding(instance)
    request = request_of(instance)
    first, second = request.blocks
    effects = order(instance)
    assert effects == [Send(D, Offer(1, GATEWAY, request.spec_now(), 4, ticket(migration_id(), 0, first), False))]
    instance.done()
    assert request.num_output == 2  # the request decodes during the copy
    assert instance.handle(Copied(migration_id(), 0), 0.0, D) == []
    assert instance.plan is not None  # the step in flight still has it
    effects = instance.done()
    assert told(effects, D) == [Stage((9, 9), 7, ticket(migration_id(), 1, second), True)]
    assert request.num_output == 3
    assert not any(isinstance(effect, RunStep) for effect in effects)
    assert instance.handle(Copied(migration_id(), 1), 0.0, D) == [Send(GATEWAY, hand_over(3))]
    assert instance.handle(Release("r", 1)) == [DropFromEngine("r")]
    assert instance.state.migration_source.num_migrated == 1
    assert instance.state.migration_source.migrated_bytes == 200
    assert instance.state.migration_source.num_failed == 0
    assert_holds_nothing(instance)


def test_the_newest_tokens_kv_is_not_shipped() -> None:
    """The last stage names all tokens, and the blocks of all except the newest, which has no KV yet."""
    instance = source()
    decoding(instance, num_prompt=8)
    request = request_of(instance)
    order(instance)
    instance.handle(Copied(migration_id(), 0), 0.0, D)
    [stage] = told(instance.done(), D)
    assert isinstance(stage, Stage)
    assert stage.num_computed == len(request.token_ids) - 1 == 9
    assert stage.ticket.blocks == tuple(request.blocks[2:3])


@pytest.mark.parametrize("num_prompt", [5, 40, 150])
def test_the_pause_does_not_grow_with_the_length(num_prompt: int) -> None:
    """However long a request is, at most two blocks are left to copy when it leaves the batch."""
    instance = source(max_batch_tokens=200)
    decoding(instance, num_prompt=num_prompt)
    order(instance)
    number_of_stages = 1
    while request_of(instance) not in instance.state.migration_source.paused:
        instance.done()
        for message in told(instance.effects, D):
            number_of_stages += 1
            assert isinstance(message, Stage)
            assert not message.is_last or len(message.ticket.blocks) <= 2
        if request_of(instance) not in instance.state.migration_source.paused:
            instance.handle(Copied(migration_id(), number_of_stages - 1), 0.0, D)
    assert number_of_stages <= 3


def test_decoding_goes_on_during_a_migration() -> None:
    """While a request is copied, it and others get a token in each iteration; while it is paused, the others go on."""
    instance = source(max_outgoing=1)
    decoding(instance, "other")
    decoding(instance, "r", priority=1)
    request, other = request_of(instance), request_of(instance, "other")
    order(instance)
    had, other_had = request.num_output, other.num_output
    for _ in range(3):
        instance.done()
    instance.handle(Copied(migration_id(), 0), 0.0, D)
    instance.handle(Copied(migration_id(), 1), 0.0, D)
    instance.done()
    assert (request.num_output - had, other.num_output - other_had) == (4, 4)
    assert request in instance.state.migration_source.paused
    for _ in range(3):
        instance.done()
    assert (request.num_output - had, other.num_output - other_had) == (4, 7)
    instance.handle(Copied(migration_id(), 2), 0.0, D)
    instance.handle(Release("r", 1))
    instance.done()
    assert other.num_output - other_had == 8


def test_stages_follow_as_blocks_fill() -> None:
    """Blocks that filled during a stage's copy go in a further stage, before the request is paused."""
    instance = source()
    decoding(instance)
    request = request_of(instance)
    order(instance)
    for _ in range(8):
        instance.done()
    [stage] = told(instance.handle(Copied(migration_id(), 0), 0.0, D), D)
    assert stage == Stage((9,) * 8, 12, ticket(migration_id(), 1, *request.blocks[1:3]), False)
    assert instance.handle(Copied(migration_id(), 1), 0.0, D) == []
    assert told(instance.done(), D) == [Stage((9,), 14, ticket(migration_id(), 2, request.blocks[3]), True)]


def test_a_link_slower_than_decoding_reaches_a_last_stage() -> None:
    """After eight stages the request is paused, however many tokens it made meanwhile."""
    instance = source()
    decoding(instance)
    order(instance)
    stages = []
    for number in range(12):
        for _ in range(8 if number < 8 else 1):
            stages += told(instance.done(), D)
        if request_of(instance) in instance.state.migration_source.paused:
            break
        stages += told(instance.handle(Copied(migration_id(), number), 0.0, D), D)
    assert [stage.is_last for stage in stages if isinstance(stage, Stage)] == [False] * 7 + [True]


@pytest.mark.parametrize("num_prompt", [2, 3])
def test_a_short_request_goes_in_a_single_stage(num_prompt: int) -> None:
    """Without a full block there is nothing to copy ahead, so the request is paused and copied at the step's end."""
    instance = source()
    decoding(instance, num_prompt=num_prompt)
    request = request_of(instance)
    assert order(instance) == []
    effects = instance.done()
    num_computed = num_prompt + 1
    sent = Offer(1, GATEWAY, request.spec_now(), num_computed, ticket(migration_id(), 0, request.blocks[0]), True)
    assert told(effects, D) == [sent]
    assert instance.handle(Copied(migration_id(), 0), 0.0, D) == [Send(GATEWAY, hand_over(2))]


# --- which ones, and how many ----------------------------------------------------------------------------------------


def test_low_priority_goes_first() -> None:
    """The request with the largest priority number goes first, even if a more urgent one is shorter or only waits."""
    instance = source(max_outgoing=1, max_batch_requests=2)
    decoding(instance, "urgent", num_prompt=5, priority=-1)
    decoding(instance, "lazy", num_prompt=20, priority=1)
    instance.start(spec("waits", 3))
    order(instance)
    assert chosen(instance) == ["lazy"]


def test_waiting_requests_go_first_and_then_short_ones() -> None:
    """Within a priority, requests that need no copy go first, then the shorter ones."""
    instance = source(max_batch_requests=2)
    decoding(instance, "long", num_prompt=20)
    decoding(instance, "short", num_prompt=8)
    instance.start(spec("waits", 30))
    order(instance)
    assert chosen(instance) == ["waits", "short", "long"]


def test_no_more_bytes_go_than_were_ordered() -> None:
    """Requests that do not fit into the rest of the order stay, and smaller ones behind them go."""
    instance = source()
    for name, num_prompt in (("two", 6), ("five", 18), ("three", 10)):
        decoding(instance, name, num_prompt)
    assert instance.state.memory.bytes_of(request_of(instance, "two")) == 300  # the request has grown meanwhile
    order(instance, num_bytes=650)
    assert chosen(instance) == ["two", "three"]


def test_outgoing_requests_are_bounded() -> None:
    """The next move begins when a request in flight is gone, or stays."""
    instance = source(max_outgoing=2, max_batch_requests=4)
    for number in range(4):
        decoding(instance, f"r{number}", num_prompt=8)
    order(instance)
    assert len(instance.state.migration_source) == 2
    instance.handle(Release(chosen(instance)[0], 1))
    assert len(instance.state.migration_source) == 2
    [third] = told(instance.effects, D)[1:]
    assert isinstance(third, Offer)
    assert third.transfer == migration_id(3)


@pytest.mark.parametrize(("max_tokens", "goes"), [(5, False), (100, True)])
def test_a_move_must_pay(max_tokens: int, goes: bool) -> None:
    """A request that will end soon is not worth its copy; one that may double its output is."""
    times = StepTimes(replace(PROFILE, transfer=Link(0.0, 10_000.0)))  # 10 ms for a block, as for a token
    instance = Instance(SOURCE, times=times)
    instance.handle(PeerUp(D, Role.WORKER, INFO))
    decoding(instance, num_prompt=4, max_tokens=max_tokens)
    for _ in range(3):
        instance.done()
    order(instance)
    assert chosen(instance) == (["r"] if goes else [])


def test_short_answers_predict_short_answers() -> None:
    """If all finished requests were short, a request is not worth its copy until it has run for long itself."""
    times = StepTimes(replace(PROFILE, transfer=Link(0.0, 10_000.0)))
    instance = Instance(SOURCE, times=times)
    instance.handle(PeerUp(D, Role.WORKER, INFO))
    instance.start(spec("short", 4, 1))
    instance.done()
    instance.handle(Release("short", 1))
    decoding(instance, num_prompt=4, max_tokens=100)
    order(instance)
    assert chosen(instance) == []
    for _ in range(4):
        instance.done()
    assert chosen(instance) == ["r"]


def test_a_waiting_request_always_pays() -> None:
    """A waiting request needs no copy, so it moves even over the slowest link."""
    times = StepTimes(replace(PROFILE, transfer=Link(0.0, 1.0)))
    instance = Instance(replace(SOURCE, max_batch_requests=1), times=times)
    instance.handle(PeerUp(D, Role.WORKER, INFO))
    decoding(instance, "runs")
    instance.start(spec("waits", 20))
    order(instance)
    assert chosen(instance) == ["waits"]


def test_a_request_in_prefill_stays() -> None:
    """A request moves only after its prompt has been computed."""
    instance = source(max_batch_tokens=8)
    instance.start(spec("r", 20, 50))
    instance.done()
    assert order(instance) == []
    assert chosen(instance) == []
    instance.done()
    assert chosen(instance) == []
    instance.done()
    assert chosen(instance) == ["r"]


def test_a_waiting_request_moves_by_the_hand_over_alone() -> None:
    """It has nothing to copy, so the gateway is asked at once, without a transfer."""
    instance = source(max_batch_requests=1)
    decoding(instance, "runs", num_prompt=40)
    instance.start(spec("r", 7))
    assert order(instance, num_bytes=200) == [Send(GATEWAY, hand_over(0, number=0))]
    instance.done()
    assert instance.plan is not None
    assert instance.plan.request_ids == ("runs",)
    instance.handle(Release("r", 1))
    assert list(instance.state.requests) == ["runs"]
    assert instance.state.migration_source.num_migrated == 1


def test_a_swapped_request_moves_from_the_hosts_pool_in_one_stage() -> None:
    """All of its KV is offered at once, from host blocks, and it is not swapped in meanwhile."""
    instance = short_of_memory(num_host_blocks=8)
    instance.done()
    instance.copied()
    request = request_of(instance)
    assert request.is_swapped
    num_computed = len(request.token_ids) - 1
    [offer] = told(order(instance), D)
    assert offer == Offer(
        1,
        GATEWAY,
        request.spec_now(),
        num_computed,
        ticket(migration_id(), 0, *request.host_blocks, on_host=True),
        True,
    )
    instance.handle(Release("other", 1))
    instance.done()
    assert request.is_swapped
    assert instance.plan is None
    instance.handle(Copied(migration_id(), 0), 0.0, D)
    instance.handle(Release("r", 1))
    assert_holds_nothing(instance)


def test_a_swapped_request_that_stays_is_brought_back() -> None:
    """If the destination has no room, the request goes on at the source as soon as there is some."""
    instance = short_of_memory(num_host_blocks=8)
    instance.done()
    instance.copied()
    order(instance)
    instance.handle(Declined(migration_id(), DeclineReason.NO_BLOCKS), 0.0, D)
    instance.handle(Release("other", 1))
    instance.done()
    instance.copied()
    assert_goes_on(instance)


# --- the other modes -------------------------------------------------------------------------------------------------


def test_blocking_copies_all_while_the_request_is_paused() -> None:
    """The request leaves the batch first, and its single stage is all of its KV."""
    instance = source(MigrationMode.BLOCKING)
    decoding(instance, num_prompt=20)
    request = request_of(instance)
    assert order(instance) == []
    effects = instance.done()
    num_computed = len(request.token_ids) - 1
    blocks = request.blocks[: -(-num_computed // 4)]
    assert effects[1:] == [
        Send(D, Offer(1, GATEWAY, request.spec_now(), num_computed, ticket(migration_id(), 0, *blocks), True))
    ]
    assert instance.handle(Copied(migration_id(), 0), 0.0, D) == [Send(GATEWAY, hand_over(2))]


def test_recomputing_copies_nothing() -> None:
    """The request is paused, its KV is dropped, and the gateway is asked at once; if it stays, it is computed again."""
    instance = source(MigrationMode.RECOMPUTE, prefix_cache=False)
    decoding(instance, num_prompt=20)
    assert order(instance) == []
    assert instance.done()[1:] == [Send(GATEWAY, hand_over(2, number=0))]
    assert instance.state.memory.device.num_free_blocks == 64
    order(instance, num_bytes=0)
    instance.handle(Keep("r", 1))
    assert instance.plan is not None
    assert (instance.plan.starts, len(instance.plan.token_ids[0])) == ((0,), 22)


# --- orders ----------------------------------------------------------------------------------------------------------


def test_an_unknown_destination_is_met_first() -> None:
    """The instance asks to meet the worker, and begins when it is up; each order asks again."""
    instance = Instance(SOURCE)
    decoding(instance)
    assert order(instance) == [Meet(D)]
    assert order(instance) == [Meet(D)]
    assert chosen(instance) == []
    instance.handle(PeerUp(D, Role.WORKER, INFO))
    assert chosen(instance) == ["r"]


def test_a_later_order_replaces_the_one_before() -> None:
    """Migrations in flight keep their destination; later ones go to the new one."""
    instance = source(max_outgoing=1)
    decoding(instance, "first", num_prompt=5)
    decoding(instance, "second", num_prompt=20)
    order(instance, D)
    assert told(instance.effects, D)
    assert order(instance, E) == []
    assert chosen(instance) == ["first"]
    assert told(instance.handle(Release("first", 1)), D, E) == [Withdrawn(migration_id()), *told(instance.effects, E)]
    [offer] = told(instance.effects, E)
    assert isinstance(offer, Offer)
    assert offer.request.request_id == "second"


def test_an_order_ends() -> None:
    """After an order of 0 bytes, its deadline, or its destination's death no other request leaves."""
    endings: list[tuple[Message, float]] = [
        (MigrateTo(D, 0, 5.0), 1.0),
        (PeerDown(D), 1.0),
        (Tick(), 5.0),
    ]
    for ending, now in endings:
        instance = source()
        order(instance)
        instance.handle(ending, now, COORDINATOR)
        instance.handle(PeerUp(D, Role.WORKER, INFO), now)
        instance.handle(Start(1, spec("r", 5, 50)), now)
        for _ in range(3):
            instance.done(now=now)
        assert chosen(instance) == []


def test_an_order_waits_for_requests() -> None:
    """A request that arrives within the order's time moves as well."""
    instance = source()
    assert order(instance) == []
    effects = instance.start(spec("r", 5))
    assert effects[-1] == Send(GATEWAY, hand_over(0, number=0))
    assert instance.plan is None


def test_an_order_moves_a_request_once_its_prefill_ends() -> None:
    """A request in prefill when the order came moves as soon as it decodes."""
    instance = source()
    instance.start(spec("r", 5, 50))
    order(instance)
    assert chosen(instance) == []
    instance.done()
    assert chosen(instance) == ["r"]


def test_a_request_that_arrived_stays_for_one_token() -> None:
    """A request that was handed over to this worker does not leave before its next token, despite an order."""
    instance = source()
    come = replace(spec("r", 8, 40), output_token_ids=(9, 8))
    blocks = ticket(migration_id(), 0, 40, 41, 42)
    [fetch] = instance.handle(Offer(1, GATEWAY, come, 9, blocks, True), 0.0, D)
    assert isinstance(fetch, Fetch)
    instance.handle(CopyDone(fetch.copy_id, 0.01))
    order(instance)
    instance.handle(Start(2, come, transfer=Transfer(D, migration_id())))
    assert chosen(instance) == []
    instance.done()
    assert chosen(instance) == ["r"]


def test_load_reports_count_migrations() -> None:
    """The coordinator hears how many requests are in flight, how many left with how many bytes, and how many stayed."""

    def counts(instance: Instance) -> tuple[int, int, int, int]:
        [report] = told(instance.handle(PeerUp(COORDINATOR, Role.COORDINATOR)), COORDINATOR)
        assert isinstance(report, LoadReport)
        return report.num_migrating, report.num_migrated, report.migrated_bytes, report.num_migrations_failed

    instance = at("handing over")
    assert counts(instance) == (1, 0, 0, 0)
    instance.handle(Release("r", 1))
    assert counts(instance) == (0, 1, 200, 0)
    instance = at("handing over")
    instance.handle(Keep("r", 1))
    assert counts(instance) == (0, 0, 0, 1)


# --- through a whole cluster -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(MigrationMode))
def test_a_request_goes_to_and_fro(mode: MigrationMode) -> None:
    """Each move is committed once, the client gets each token once and soon, and KV is computed twice only if the mode
    drops it.
    """
    world = World(num_workers=2, num_blocks=48, scheduling=Scheduling(migration=mode))
    world.open("r", tuple(range(2, 42)), 100)  # an answer that no stop token ends
    client, gateway = world.clients["r"], world.processes["gateway-0"].core
    assert isinstance(gateway, GatewayState)
    gap = last = 0
    while not client.end:
        num_tokens, owner = len(client.tokens), gateway.sessions["r"].instance
        if num_tokens >= last + 8 and owner is not None:
            last = num_tokens
            num_bytes = (
                -(-(44 + num_tokens) // 4) * 32
            )  # about the request's own size: after one move the order is fulfilled
            world.migrate(owner.name, "worker-1" if owner.name == "worker-0" else "worker-0", num_bytes)
        world.progress()
        gap = 0 if len(client.tokens) > num_tokens else gap + 1
        assert gap < 15
    assert client.tokens == client.expected
    assert gateway.counts.num_handed_over >= 3
    num_fed = sum(
        len(effect.plan.token_ids[0])
        for process in world.lives
        for *_, effects in process.log
        for effect in effects
        if isinstance(effect, RunStep)
    )
    num_needed = 40 + len(client.tokens) - 1
    assert num_fed > num_needed if mode is MigrationMode.RECOMPUTE else num_fed == num_needed
    world.settle()
    world.check_at_rest()
