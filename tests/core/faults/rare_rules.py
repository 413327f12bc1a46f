"""What rarely happens by itself, because several faults must meet in the right order."""

from dataclasses import replace
from itertools import pairwise
from random import Random

from actorserve.core.instance.state import InstanceState
from actorserve.core.messages import (
    CheckpointConfirmed,
    Copied,
    HandOver,
    InstanceRole,
    Keep,
    Release,
    Start,
    Tokens,
    Transfer,
)
from tests.core.faults.machine import ClusterMachine, Rules
from tests.core.world.parts import RETRY_S, TOKENS_PER_BLOCK
from tests.core.world.world import Link


def copies_fail(machine: ClusterMachine, chance: Random) -> str | None:
    """A copy from another worker fails, maybe after it has written a part."""
    names = machine.world.fetching
    if not names:
        return None
    into_host = [name for name in names if machine.world.processes[name].fetches[0].into_host]
    name = chance.choice(into_host if into_host and chance.random() < 0.5 else names)
    if chance.random() < 0.5:
        machine.tear_fetch(name)
    machine.world.finish_fetch(name, failed=True)
    machine.progress(chance.randint(0, 3))
    return name


def blocks_change_under_a_copy(machine: ClusterMachine, chance: Random) -> str | None:
    """The source of a copy runs short of memory while the copy reads, so that other requests get these blocks."""
    world = machine.world
    if not world.fetching and len(machine.workers) > 1:
        one, other = chance.sample(machine.workers, 2)
        world.migrate(one, other, 10_000)
        machine.progress(chance.randint(1, 3), fetches=False)
    live = {process.peer for process in world.processes.values()}
    names = [name for name in world.fetching if world.processes[name].fetches[0].source in live]
    if not names:
        return None
    name = chance.choice(names)
    source = world.processes[name].fetches[0].source.name
    if chance.random() < 0.5:
        machine.tear_fetch(name)
    num_blocks = chance.randint(world.num_blocks // 6, world.num_blocks // 2)
    world.limit_memory(source, num_blocks)
    machine.open(chance, 20, 3)
    rounds, copies = chance.randint(1, 10), chance.random() < 0.5
    machine.progress(rounds, copies=copies, fetches=False)
    # Now it ends, and what it has read is used if the source does not know better.
    for _ in range(len(world.processes[name].fetches) if name in world.fetching else 0):
        world.finish_fetch(name)
    machine.progress(chance.randint(0, 4), copies=chance.random() < 0.5, fetches=False)
    if source in world.processes and chance.random() < 0.7:
        world.limit_memory(source, world.num_blocks)
    machine.progress(chance.randint(0, 8))
    return f"{source} has {num_blocks} blocks for {rounds} rounds, while {name} reads"


def copies_follow_iterations(machine: ClusterMachine, chance: Random) -> str | None:
    """A prompt is handed off while messages are much faster than engines. The copy of its last chunk ends before the
    source's core hears that the iteration has ended, or the other way round.
    """
    world = machine.world
    following = [name for name in machine.workers if world.processes[name].follows]
    if len(following) < 2:
        return None
    destination = chance.choice(following)
    for name in machine.workers:
        world.set_role(name, InstanceRole.TOKEN if name == destination else InstanceRole.PROMPT)
    for _ in range(4):
        world.deliver_all()  # the roles are known
    machine.open(chance, 20, 2)
    for _ in range(8):
        for _ in range(6):
            world.deliver_all()
            for name in world.fetching:
                world.finish_fetch(name)
        waiting = [fetch for process in world.processes.values() for fetch in process.fetches if fetch.ticket.step_id]
        if waiting or not world.stepping:
            break
        world.finish_step(chance.choice(world.stepping))
    machine.progress(chance.randint(0, 2), early=chance.random() < 0.7, fetches=chance.random() < 0.7)
    return f"to {destination}, {len(waiting)} wait"


def hand_over_is_refused(machine: ClusterMachine, chance: Random) -> str | None:
    """The gateway loses the destination before the HandOver arrives."""
    world = machine.world
    found = machine.in_flight(HandOver)
    if not found:
        return None
    link, index = chance.choice(found)
    message = world.links[link][index]
    assert isinstance(message, HandOver)
    gateway, destination = link[1].name, message.to.name
    if gateway not in world.processes or destination not in world.processes:
        return None
    world.lose(gateway, destination)
    world.deliver(link, index)
    for answer, place in machine.in_flight(Keep):
        world.repeat_later(answer, place)
    if chance.random() < 0.5:
        machine.progress(chance.randint(0, 2))
    world.find(gateway, destination)
    return f"{gateway} loses {destination}"


def hand_over_is_late(machine: ClusterMachine, chance: Random) -> str | None:
    """The HandOver or its answer is lost, or so late that it is repeated."""
    world = machine.world
    found = machine.in_flight(HandOver)
    if not found:
        return None
    link, index = chance.choice(found)
    how = chance.choice(("lost", "late", "answer lost"))
    match how:
        case "lost":
            world.drop(link, index)
        case "answer lost":
            world.deliver(link, index)
            answers = (link[1], link[0])
            while answers in world.links:
                world.drop(answers)
    machine.seen("hand-over timed out")
    world.advance(RETRY_S * 1.1)
    for name in world.stepping:
        world.finish_step(name)
    machine.progress(chance.randint(0, 3))
    return how


def old_keep_meets_new_hand_over(machine: ClusterMachine, chance: Random) -> str | None:
    """A request that once stayed at a worker comes back there under a later epoch, and is about to move again, when the
    old answer arrives once more.
    """
    world = machine.world
    owners = {session.spec.request_id: session for _, session in machine.sessions}
    live = {world.processes[name].peer for name in machine.workers}
    for place, ((_, target), message) in enumerate(world.repeats):
        if not isinstance(message, Keep) or target not in live or message.request_id not in owners:
            continue
        request_id, session = message.request_id, owners[message.request_id]
        if session.instance not in live or session.instance is None or session.epoch == message.epoch:
            continue
        if session.instance != target:
            world.migrate(session.instance.name, target.name, 10_000)
            machine.progress(6)
            return f"{request_id} moves back to {target.name}"
        for _ in range(8):
            if any(request.request_id == request_id for request in machine.worker(target.name).migration_source.paused):
                world.deliver_repeat(place)
                machine.progress(2)
                return f"{request_id} on {target.name}"
            others = [name for name in machine.workers if name != target.name]
            if not others or target.name not in machine.workers:
                break
            world.migrate(target.name, others[0], 10_000)
            machine.progress(1)
        return f"{request_id} does not move from {target.name}"
    return None


def answers_come_twice(machine: ClusterMachine, chance: Random) -> str | None:
    """An answer about a copy comes once more when the next copy has begun, or the request is somewhere else."""
    world = machine.world
    found = machine.in_flight(Copied, CheckpointConfirmed, Release, Start)
    if not found:
        return None
    link, index = chance.choice(found)
    message = world.links[link][index]
    world.repeat_later(link, index)
    world.deliver(link, index)
    machine.progress(chance.randint(0, 3), fetches=chance.random() < 0.3)
    world.deliver_repeat(len(world.repeats) - 1)
    return type(message).__name__


def request_moves_on(machine: ClusterMachine, chance: Random) -> str | None:
    """Requests move from one worker to another, and from there to a third one or back."""
    workers = machine.workers
    if len(workers) < 2:
        return None
    path = chance.sample(workers, 2)
    path.append(chance.choice([name for name in workers if name != path[-1]]))
    for source, destination in pairwise(path):
        if source not in machine.world.processes or destination not in machine.world.processes:
            break
        machine.world.migrate(source, destination, 10_000)
        if chance.random() < 0.5 and machine.links:
            link = chance.choice(machine.links)
            machine.world.repeat_later(link, chance.randrange(len(machine.world.links[link])))
        machine.progress(chance.randint(3, 9))
        for link, index in machine.in_flight(HandOver, Tokens)[:2]:
            machine.world.repeat_later(link, index)
    return " to ".join(path)


def checkpointed_worker_dies(machine: ClusterMachine, chance: Random) -> str | None:
    """A worker dies whose requests have checkpoints elsewhere. Its newest tokens may be lost with it."""
    world = machine.world
    found = [
        (gateway, session.instance)
        for gateway, session in machine.sessions
        if session.checkpointed is not None
        and session.instance is not None
        and session.instance.name in world.processes
        and session.checkpointed.holder.name in world.processes
    ]
    if not found:
        return None
    gateway, worker = chance.choice(found)
    if chance.random() < 0.5:
        while lost := [(link, index) for link, index in machine.in_flight(Tokens) if link[0] == worker]:
            world.drop(*lost[-1])
    world.kill(worker.name)
    for survivor, dead in list(world.pending_deaths):
        if dead == worker and survivor.name == gateway:
            world.tell_death(survivor, dead)
    machine.progress(chance.randint(0, 4))
    return f"{worker.name}"


def first_tokens_are_lost(machine: ClusterMachine, chance: Random) -> str | None:
    """Requests begin on a worker, and it dies before their gateway has a token of them, but not before it knows of
    their checkpoints.
    """
    world = machine.world
    machine.open(chance, 40, 4)
    machine.progress(1)
    if not machine.workers:
        return None
    name = chance.choice(machine.workers)
    rounds = chance.randint(4, 10)
    for _ in range(rounds):
        while lost := [(link, index) for link, index in machine.in_flight(Tokens) if link[0].name == name]:
            world.drop(*lost[-1])
        machine.progress(1)
        world.advance(0.15)
    if name in world.processes:
        while lost := [(link, index) for link, index in machine.in_flight(Tokens) if link[0].name == name]:
            world.drop(*lost[-1])
        dead = world.processes[name].peer
        world.kill(name)
        for survivor, noticed in list(world.pending_deaths):
            if noticed == dead:
                world.tell_death(survivor, noticed)
    return f"{name} dies after {rounds} rounds"


def start_names_another_transfer(machine: ClusterMachine, chance: Random) -> str | None:
    """A Start names a transfer that copied KV of another request."""
    if not any(kv_for_others(machine.worker(name)) for name in machine.workers):
        return None
    for _ in range(3):
        if found := starts_with_other_transfers(machine):
            break
        machine.open(chance, 20, 2)
        machine.progress(1, fetches=False)
    else:
        return "no start in time"
    link, index, start = chance.choice(found)
    world = machine.world
    world.links[link][index] = start
    assert start.transfer is not None
    machine.seen(f"{start.transfer.id.kind} of another request")
    machine.progress(chance.randint(0, 3), fetches=False)
    return f"{start.request.request_id} at {link[1].name}"


def starts_with_other_transfers(machine: ClusterMachine) -> list[tuple[Link, int, Start]]:
    """The Starts in flight with their places, each with every transfer at its worker that copied other tokens' KV."""
    world = machine.world
    found: list[tuple[Link, int, Start]] = []
    for link, index in machine.in_flight(Start):
        start, process = world.links[link][index], world.processes.get(link[1].name)
        if not isinstance(start, Start) or process is None or process.peer != link[1]:
            continue
        token_ids = [*start.request.prompt_token_ids, *start.request.output_token_ids]
        for transfer, kv_tokens in kv_for_others(machine.worker(link[1].name)):
            num_tokens = min(len(token_ids) - 1, len(kv_tokens))
            if transfer != start.transfer and token_ids[:num_tokens] != kv_tokens[:num_tokens]:
                found.append((link, index, replace(start, transfer=transfer)))
    return found


def kv_for_others(worker: InstanceState) -> list[tuple[Transfer, list[int]]]:
    """The tokens whose KV the worker holds for requests that are not started there: of checkpoints those confirmed."""
    incoming, stored = worker.migration_destination._incoming, worker.checkpoint_store._stored
    migrations = [(transfer, list(found.kv.token_ids)) for transfer, found in incoming.items()]
    checkpoints = [
        (transfer, list(found.kv.token_ids[: found.num_confirmed * TOKENS_PER_BLOCK]))
        for transfer, found in stored.items()
    ]
    return migrations + [(transfer, token_ids) for transfer, token_ids in checkpoints if token_ids]


RARE_RULES: Rules = {
    old_keep_meets_new_hand_over: 3,
    answers_come_twice: 4,
    copies_fail: 6,
    blocks_change_under_a_copy: 8,
    copies_follow_iterations: 6,
    hand_over_is_refused: 4,
    hand_over_is_late: 3,
    request_moves_on: 2,
    checkpointed_worker_dies: 3,
    first_tokens_are_lost: 2,
    start_names_another_transfer: 4,
}
