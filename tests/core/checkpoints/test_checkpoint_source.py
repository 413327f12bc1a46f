"""Scenarios of KV checkpoints: what a source has read, confirms and withdraws; and deaths of workers and holders."""

from dataclasses import replace

import pytest

from actorserve.core.effects import Meet, RunStep, Send
from actorserve.core.instance.state import InstanceState
from actorserve.core.kv.layer_groups import LayerGroups
from actorserve.core.messages import (
    Checkpoint,
    CheckpointConfirmed,
    Checkpointed,
    CheckpointTo,
    Copied,
    Declined,
    DeclineReason,
    Message,
    PeerDown,
    PeerUp,
    Release,
    Role,
    Start,
    Tick,
    Withdrawn,
)
from tests.core.harness.driver import GATEWAY, Instance, checkpoint_id, spec
from tests.core.harness.source import (
    COORDINATOR,
    INFO,
    SOURCE,
    D,
    E,
    assert_goes_on,
    assert_holds_nothing,
    decoding,
    request_of,
    short_of_memory,
    source,
    ticket,
    told,
)
from tests.core.world.world import Scheduling, World

N, NEXT = map(checkpoint_id, (1, 2))


# --- the source ------------------------------------------------------------------------------------------------------


def checkpointed(num_prompt: int = 9, every_tokens: int = 4, **changes: object) -> Instance:
    """A source whose request r decodes, and whose holder D has just been asked to read its full blocks."""
    instance = source(checkpoint_tokens=every_tokens, **changes)  # type: ignore[arg-type]
    decoding(instance, num_prompt=num_prompt)
    instance.handle(CheckpointTo(D), 1.0, COORDINATOR)
    return instance


def confirmed(num_prompt: int = 9, **changes: object) -> Instance:
    """The same source after D has read the blocks."""
    instance = checkpointed(num_prompt, **changes)  # type: ignore[arg-type]
    instance.handle(Copied(N, 0), 1.0, D)
    return instance


def test_full_blocks_are_read_confirmed_and_told_to_the_gateway() -> None:
    """The holder is asked to read all full blocks with their tokens; after it, the holder and the gateway are told."""
    instance = checkpointed()
    request = request_of(instance)
    first = Checkpoint("r", GATEWAY, 0, tuple(range(8)), ticket(N, 0, *request.blocks[:2]))
    assert told(instance.effects, D) == [first]
    assert instance.handle(Copied(N, 0), 1.0, D) == [
        Send(GATEWAY, Checkpointed("r", 1, D, N)),
        Send(D, CheckpointConfirmed(N, 0)),
    ]
    assert instance.state.checkpoint_source.checkpointed_bytes == 200
    assert_goes_on(instance)


def test_new_blocks_follow_after_enough_tokens() -> None:
    """The next read begins after every_tokens new tokens, names only unconfirmed blocks, and is confirmed in turn."""
    instance = confirmed(every_tokens=8)
    sent = [message for step in range(6) for message in told(instance.done(now=2.0 + step), D)]
    assert sent == []
    request = request_of(instance)
    [second] = told(instance.done(now=9.0), D)
    assert second == Checkpoint("r", GATEWAY, 2, (8, *(9,) * 7), ticket(N, 1, *request.blocks[2:4]))
    assert told(instance.handle(Copied(N, 1), 9.0, D), D) == [CheckpointConfirmed(N, 1)]


def test_a_long_prompt_is_read_in_parts() -> None:
    """No read exceeds 64 blocks, so that most blocks are confirmed early. A request has one read at a time."""
    instance = source(checkpoint_tokens=4, num_blocks=200, max_context_tokens=800, max_batch_tokens=800)
    decoding(instance, num_prompt=602, max_tokens=100)
    sent = told(instance.handle(CheckpointTo(D), 1.0, COORDINATOR), D)
    for stage, now in enumerate((2.0, 3.0)):
        assert told(instance.done(now=now), D) == []
        sent += told(instance.handle(Copied(N, stage), now + 0.5, D), D)
    assert [len(message.ticket.blocks) for message in sent if isinstance(message, Checkpoint)] == [64, 64, 23]


WINDOWED = {
    "checkpoint_tokens": 4,
    "num_blocks": 900,
    "max_context_tokens": 1200,
    "max_batch_tokens": 64,
    "layer_groups": LayerGroups(1, 2, window=40),
}


@pytest.mark.parametrize(
    ("num_rows", "num_read"), [(60, [60]), (68, [68]), (75, [64, 11]), (130, [64, 66]), (140, [64, 64, 12])]
)
def test_the_last_read_of_a_long_prompt_has_its_whole_window(num_rows: int, num_read: list[int]) -> None:
    """Reads without the window's blocks end before the window, and the last one has them from the first seen row on."""
    instance = source(**WINDOWED)  # type: ignore[arg-type]
    decoding(instance, num_prompt=4 * num_rows + 1)
    sent = told(instance.handle(CheckpointTo(D), 1.0, COORDINATOR), D)
    for stage in range(len(num_read) - 1):
        sent += told(instance.handle(Copied(N, stage), 2.0 + stage, D), D)
    reads = [message for message in sent if isinstance(message, Checkpoint)]
    assert [len(message.token_ids) // 4 for message in reads] == num_read
    num_windowed = [len(message.ticket.blocks) - rows for message, rows in zip(reads, num_read, strict=True)]
    assert num_windowed == [0] * (len(reads) - 1) + [2 * 10]  # the next token sees 39 more


def test_a_read_of_new_rows_outlives_older_ones() -> None:
    """A slow read is confirmed if the request kept the blocks that were read, whatever it gave up before them."""
    instance = source(**WINDOWED)  # type: ignore[arg-type]
    decoding(instance, num_prompt=4 * 20 + 1)
    instance.handle(CheckpointTo(D), 1.0, COORDINATOR)
    assert told(instance.handle(Copied(N, 0), 1.1, D), D) == [CheckpointConfirmed(N, 0)]
    first_row = request_of(instance).first_row
    sent: list[Message] = []
    for step in range(32):
        sent += told(instance.done(now=2.0 + step / 10), D)
    (read,) = sent
    assert isinstance(read, Checkpoint)
    assert request_of(instance).first_row > first_row + 2 * len(read.token_ids) // 4
    assert told(instance.handle(Copied(N, 1), 6.0, D), D)[0] == CheckpointConfirmed(N, 1)


def test_two_reads_at_a_time_for_the_requests_with_most_to_lose() -> None:
    """Two reads run at once, first for the requests with the most new blocks; the third request follows."""
    instance = source(checkpoint_tokens=4)
    for name, num_prompt in (("short", 5), ("long", 20), ("longer", 30)):
        decoding(instance, name, num_prompt)
    sent = told(instance.handle(CheckpointTo(D), 1.0, COORDINATOR), D)
    assert [message.request_id for message in sent if isinstance(message, Checkpoint)] == ["longer", "long"]
    assert told(instance.done(now=2.0), D) == []
    sent = told(instance.handle(Copied(N, 0), 2.0, D), D)
    assert [message.request_id for message in sent if isinstance(message, Checkpoint)] == ["short"]


def test_a_request_in_prefill_is_not_read() -> None:
    """A request without a token costs little to start again, so it has no checkpoints."""
    instance = source(checkpoint_tokens=4, max_batch_tokens=8)
    instance.handle(CheckpointTo(D), 1.0, COORDINATOR)
    instance.start(spec("r", 20, 50))
    assert [told(instance.done(now=now), D) for now in (2.0, 3.0)] == [[], []]
    assert told(instance.done(now=4.0), D)


@pytest.mark.parametrize("num_host_blocks", [0, 8])
def test_a_read_during_which_blocks_were_lost_is_void(num_host_blocks: int) -> None:
    """A read of a request that was preempted meanwhile is not confirmed, and is repeated once the request is back."""
    instance = short_of_memory(checkpoint_tokens=4, num_host_blocks=num_host_blocks)
    asked = told(instance.handle(CheckpointTo(D), 1.0, COORDINATOR), D)
    [transfer] = [
        message.transfer for message in asked if isinstance(message, Checkpoint) and message.request_id == "r"
    ]
    instance.done(now=1.0)
    if num_host_blocks:
        instance.copied(1.0)
    assert told(instance.handle(Copied(transfer, 0), 1.0, D), D) == []
    instance.handle(Release("other", 1), 1.0)
    for step in range(6):
        instance.done(now=2.0 + step)
        while instance.copies:
            instance.copied(2.0 + step)
        for message in told(instance.effects, D):
            if isinstance(message, Checkpoint) and message.transfer == transfer:
                assert (message.num_confirmed, message.ticket.stage) == (0, 1)
                return
    raise AssertionError("it was not read anew")


def test_a_read_that_ends_before_a_swap_out_counts() -> None:
    """Until a swap out has ended the blocks hold the request's KV, so that a read of them is confirmed."""
    instance = short_of_memory(checkpoint_tokens=4, num_host_blocks=8)
    asked = told(instance.handle(CheckpointTo(D), 1.0, COORDINATOR), D)
    [transfer] = [
        message.transfer for message in asked if isinstance(message, Checkpoint) and message.request_id == "r"
    ]
    instance.done(now=1.0)
    assert request_of(instance).copy_id is not None
    assert told(instance.handle(Copied(transfer, 0), 1.0, D), D) == [CheckpointConfirmed(transfer, 0)]


def test_confirmed_blocks_survive_a_preemption() -> None:
    """Blocks that were confirmed before a preemption are not read again after it."""
    instance = short_of_memory(checkpoint_tokens=4)
    asked = told(instance.handle(CheckpointTo(D), 1.0, COORDINATOR), D)
    [transfer] = [
        message.transfer for message in asked if isinstance(message, Checkpoint) and message.request_id == "r"
    ]
    assert told(instance.handle(Copied(transfer, 0), 1.0, D), D) == [CheckpointConfirmed(transfer, 0)]
    num_confirmed = request_of(instance).num_computed // 4
    instance.done(now=1.0)
    assert not request_of(instance).blocks
    instance.handle(Release("other", 1), 1.0)
    sent = [message for step in range(8) for message in told(instance.done(now=2.0 + step), D)]
    again = next(message for message in sent if isinstance(message, Checkpoint) and message.transfer == transfer)
    assert (again.num_confirmed, again.ticket.stage) == (num_confirmed, 1)


@pytest.mark.parametrize("reason", DeclineReason)
def test_the_source_rests_after_a_decline(reason: DeclineReason) -> None:
    """After two seconds it goes on behind the confirmed blocks if only the read failed, else it begins again."""
    instance = confirmed()
    sent = [message for now in (1.2, 1.4, 1.6) for message in told(instance.done(now=now), D)]
    assert [message.ticket.stage for message in sent if isinstance(message, Checkpoint)] == [1]
    instance.handle(Declined(N, reason), 2.0, D)
    assert [told(instance.done(now=now), D) for now in (2.5, 3.9)] == [[], []]
    [again] = told(instance.done(now=4.0), D)
    assert isinstance(again, Checkpoint)
    goes_on = reason in (DeclineReason.NO_BLOCKS, DeclineReason.UNREACHABLE)
    assert (again.transfer, again.num_confirmed, again.ticket.stage) == ((N, 2, 2) if goes_on else (NEXT, 0, 0))
    assert_goes_on(instance)


def test_a_first_read_that_was_declined_is_begun_anew() -> None:
    """Nothing is confirmed yet, so the transfer ends, and the next read has a new one."""
    instance = checkpointed()
    instance.handle(Declined(N, DeclineReason.NO_BLOCKS), 1.0, D)
    [again] = told(instance.done(now=3.0), D)
    assert isinstance(again, Checkpoint)
    assert (again.transfer, again.num_confirmed, again.ticket.stage) == (NEXT, 0, 0)


def test_an_unanswered_read_is_repeated() -> None:
    """After ten seconds the same Checkpoint is sent again, even if no new read begins. No deadline lies in the past."""
    instance = checkpointed()
    [asked] = told(instance.effects, D)
    instance.done(now=10.95)
    assert instance.state.checkpoint_source.next_deadline() == 11.0
    assert told(instance.handle(Tick(), 11.0), D) == [asked]
    assert instance.state.checkpoint_source.next_deadline() == 21.0


def test_the_end_of_a_request_ends_its_checkpoints() -> None:
    """However the request leaves, the holder gets Withdrawn."""
    instance = confirmed()
    assert told(instance.handle(Release("r", 1), 2.0), D) == [Withdrawn(N)]
    assert not instance.state.checkpoint_source
    instance.done(now=2.0)
    assert_holds_nothing(instance)
    instance = confirmed()
    assert told(instance.handle(PeerDown(GATEWAY), 2.0), D) == [Withdrawn(N)]
    assert not instance.state.checkpoint_source


def test_a_holder_that_asks_is_answered() -> None:
    """It gets the confirmation again for checkpoints that are of use, and Withdrawn for others."""
    instance = confirmed()
    assert told(instance.handle(Copied(N, 0), 20.0, D), D)[0] == CheckpointConfirmed(N, 0)
    instance.handle(Release("r", 1), 20.0)
    assert told(instance.handle(Copied(N, 0), 20.0, D), D) == [Withdrawn(N)]


def test_a_dead_holder_is_forgotten() -> None:
    """Nothing is sent to it, and the next holder begins from nothing."""
    instance = confirmed()
    assert instance.handle(PeerDown(D), 2.0) == []
    assert instance.state.checkpoint_source.holder is None
    assert told(instance.done(now=3.0), D, E) == []
    [anew] = told(instance.handle(CheckpointTo(E), 4.0, COORDINATOR), D, E)
    assert isinstance(anew, Checkpoint)
    assert (anew.transfer, anew.num_confirmed, anew.ticket.stage) == (NEXT, 0, 0)


def test_another_holder_replaces_the_one_before() -> None:
    """The previous holder gets Withdrawn, now and for each later message; a repeated CheckpointTo changes nothing."""
    instance = confirmed()
    assert instance.handle(CheckpointTo(D), 1.5, COORDINATOR) == []
    effects = instance.handle(CheckpointTo(E), 2.0, COORDINATOR)
    assert told(effects, D) == [Withdrawn(N)]
    assert isinstance(told(effects, E)[0], Checkpoint)
    assert told(instance.handle(Copied(N, 0), 2.0, D), D) == [Withdrawn(N)]


def test_an_unknown_holder_is_met_first() -> None:
    """Its first read begins when it is up."""
    instance = Instance(replace(SOURCE, checkpoint_tokens=4))
    decoding(instance, max_tokens=20)
    assert instance.handle(CheckpointTo(D), 1.0, COORDINATOR) == [Meet(D)]
    assert told(instance.handle(PeerUp(D, Role.WORKER, INFO), 2.0), D)


def test_without_checkpoints_no_worker_holds_any() -> None:
    """With checkpoint_tokens 0 a CheckpointTo has no effect."""
    instance = source()
    decoding(instance)
    assert instance.handle(CheckpointTo(D), 1.0, COORDINATOR) == []
    assert instance.state.checkpoint_source.holder is None


# --- all together ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rounds", [10, 14, 20])
def test_a_dead_workers_requests_go_on_at_the_holder(num_rounds: int) -> None:
    """They get the same tokens as without the death, and the holder computes only the tokens after its checkpoints."""
    world = World(num_workers=2, num_blocks=48, scheduling=Scheduling(num_host_blocks=80, checkpoint_tokens=4))
    world.checkpoint("worker-0", "worker-1")
    world.checkpoint("worker-1", "worker-0")
    for number in range(4):
        world.open(f"r{number}", tuple(range(number, number + 17)), 40)
    for _ in range(num_rounds):
        world.progress()
        world.advance(0.1)
    world.kill("worker-0")
    world.settle()
    assert all(client.tokens == client.expected for client in world.clients.values())
    log = world.processes["worker-1"].log
    adopted = [m.request.request_id for _, _, m, _ in log if isinstance(m, Start) and m.transfer is not None]
    assert len(adopted) == 2
    starts: dict[str, int] = {}  # of each request: the first token that was computed
    for _, _, _, effects in log:
        for effect in effects:
            if isinstance(effect, RunStep):
                for request_id, start in zip(effect.plan.request_ids, effect.plan.starts, strict=True):
                    starts.setdefault(request_id, start)
    assert all(starts[request_id] >= 16 for request_id in adopted)
    survivor = world.processes["worker-1"].core
    assert isinstance(survivor, InstanceState)
    assert survivor.checkpoint_source.checkpointed_bytes > 0
    world.check_at_rest()


def test_a_death_just_after_a_long_prompt_costs_its_decode_alone() -> None:
    """Layers with a window gave up most of the prompt's KV, but the checkpoint has what the next token sees."""
    scheduling = Scheduling(num_host_blocks=400, checkpoint_tokens=4, layer_groups=LayerGroups(1, 2, window=40))
    world = World(num_workers=2, num_blocks=100, max_batch_tokens=64, scheduling=scheduling)
    world.checkpoint("worker-0", "worker-1")
    world.checkpoint("worker-1", "worker-0")
    world.open("r", tuple(number % 50 for number in range(4 * 70 + 1)), 40)
    for _ in range(12):
        world.progress()
        world.advance(0.1)
    owner = world.owners[("r", 1)].name
    world.kill(owner)
    world.settle()
    (client,) = world.clients.values()
    assert client.tokens == client.expected
    (survivor,) = {"worker-0", "worker-1"} - {owner}
    starts = [
        effect.plan.starts[0]
        for _, _, _, effects in world.processes[survivor].log
        for effect in effects
        if isinstance(effect, RunStep)
    ]
    assert starts[0] >= 4 * 70
    world.check_at_rest()


def test_a_dead_holder_costs_nothing() -> None:
    """Requests whose checkpoints are lost go on where they run; if that worker dies too, they are computed again."""
    world = World(num_workers=3, num_blocks=48, scheduling=Scheduling(num_host_blocks=80, checkpoint_tokens=4))
    world.checkpoint("worker-0", "worker-1")
    world.checkpoint("worker-2", "worker-1")
    world.open("r", tuple(range(17)), 40)
    for _ in range(10):
        world.progress()
        world.advance(0.1)
    owner = world.owners[("r", 1)].name
    assert owner != "worker-1"
    holder_of_r = world.processes["worker-1"].core
    assert isinstance(holder_of_r, InstanceState)
    assert len(holder_of_r.checkpoint_store) == 1
    world.kill("worker-1")
    for _ in range(4):
        world.progress()
    for survivor, dead in list(world.pending_deaths):
        world.tell_death(survivor, dead)
    world.kill(owner)
    world.settle()
    assert world.clients["r"].tokens == world.clients["r"].expected
    world.check_at_rest()
