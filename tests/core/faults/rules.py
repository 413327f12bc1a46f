"""What may happen at any time: clients, messages, engines, copies and processes misbehave."""

from random import Random

from actorserve.core.messages import InstanceRole
from tests.core.faults.machine import GATEWAYS, NAMES, ClusterMachine, Rules
from tests.core.world.world import COORDINATOR


def clients_come(machine: ClusterMachine, chance: Random) -> str:
    max_tokens = chance.randint(1, 60)
    machine.open(chance, max_tokens, 4)
    return f"up to {max_tokens} tokens each"


def all_goes_on(machine: ClusterMachine, chance: Random) -> str:
    """Faults meet requests in each stage. Swaps, copies between workers and the compiling of grammars may take long."""
    rounds, ahead = chance.randint(1, 6), chance.random() < 0.5
    copies, fetches, compiles = chance.random() < 0.7, chance.random() < 0.7, chance.random() < 0.7
    talks, early = chance.choice((1, 1, 6)), chance.random() < 0.3  # messages may be faster than engines
    machine.progress(rounds, ahead=ahead, copies=copies, fetches=fetches, compiles=compiles, talks=talks, early=early)
    return f"{rounds} rounds, ahead {ahead}, copies {copies}, fetches {fetches}, compiles {compiles}, {talks} talks"


def time_passes(machine: ClusterMachine, chance: Random) -> str:
    rounds, seconds = chance.randint(1, 3), chance.choice((0.1, 0.3, 0.5, 1.0, 3.0))
    for _ in range(rounds):
        machine.world.progress()
        machine.world.advance(seconds)
    return f"{rounds} times {seconds} s"


def client_leaves(machine: ClusterMachine, chance: Random) -> str | None:
    if not machine.world.clients:
        return None
    request_id = chance.choice(sorted(machine.world.clients))
    machine.world.close(request_id)
    return request_id


def messages_misbehave(machine: ClusterMachine, chance: Random) -> str | None:
    """Messages arrive singly, early, twice, much later once more, or never."""
    world = machine.world
    how = chance.choice(("deliver", "reorder", "repeat", "repeat later", "drop"))
    for _ in range(chance.randint(1, 8)):
        if not world.links:
            return None
        link = chance.choice(machine.links)
        index = chance.randrange(len(world.links[link]))
        match how:
            case "deliver":
                world.deliver(link)
            case "reorder":
                world.deliver(link, index)
            case "repeat":
                world.deliver(link, keep=True)
            case "repeat later":
                world.repeat_later(link, index)
            case _:
                world.drop(link, index)
    return how


def repeats_arrive(machine: ClusterMachine, chance: Random) -> str | None:
    world = machine.world
    if not world.repeats:
        return None
    what = []
    for _ in range(chance.randint(1, 4)):
        if world.repeats:
            index = chance.randrange(len(world.repeats))
            what.append(type(world.repeats[index][1]).__name__)
            world.deliver_repeat(index)
    return ", ".join(what)


def one_engine_works(machine: ClusterMachine, chance: Random) -> str | None:
    """Single iterations, swaps, copies from other workers and grammars end."""
    world = machine.world
    what = []
    for _ in range(chance.randint(1, 8)):
        busy = [(name, how) for name in world.stepping for how in ("step", "compute", "plan ahead")]
        busy += [(name, "copy") for name in world.copying]
        busy += [(name, how) for name in world.fetching for how in ("fetch", "tear", "fail")]
        busy += [(name, "grammar") for name in world.compiling]
        if not busy:
            break
        name, how = chance.choice(sorted(busy))
        what.append(f"{how} on {name}")
        match how:
            case "step":
                world.finish_step(name)
            case "compute":
                world.compute_step(name)
            case "plan ahead":
                world.plan_ahead(name)
            case "copy":
                world.finish_copy(name)
            case "grammar":
                world.finish_compiling(name, chance.randrange(len(world.processes[name].compiling)))
            case "tear":
                machine.tear_fetch(name)
            case _:
                world.finish_fetch(name, failed=how == "fail")
    return ", ".join(what) or None


def requests_move(machine: ClusterMachine, chance: Random) -> str | None:
    """Order a migration, and let it go on for a while."""
    if len(machine.workers) < 2:
        return None
    source, destination = chance.sample(machine.workers, 2)
    num_bytes = chance.choice((200, 10_000))
    machine.world.migrate(source, destination, num_bytes)
    rounds, fetches = chance.randint(0, 6), chance.random() < 0.7
    machine.progress(rounds, fetches=fetches)
    return f"{num_bytes} bytes from {source} to {destination}, {rounds} rounds, fetches {fetches}"


def roles_change(machine: ClusterMachine, chance: Random) -> str | None:
    """A worker computes other phases from now on."""
    if not machine.workers:
        return None
    name, role = chance.choice(machine.workers), chance.choice(tuple(InstanceRole))
    machine.world.set_role(name, role)
    machine.progress(chance.randint(0, 3), fetches=chance.random() < 0.7)
    return f"{name} is {role.value}"


def workers_part(machine: ClusterMachine, chance: Random) -> str | None:
    """Two workers lose each other, or one of them the other; an order to move requests ends; or one worker becomes the
    holder of the other's checkpoints.
    """
    if len(machine.workers) < 2:
        return None
    one, other = chance.sample(machine.workers, 2)
    how = chance.choice(("part", "one-sided", "one-sided", "no more", "guard"))
    match how:
        case "part":
            machine.world.part(one, other)
        case "one-sided":
            machine.world.part_one_sided(one, other)
            machine.seen("one-sided cut")
        case "guard":
            machine.world.checkpoint(one, other)
        case _:
            machine.world.migrate(one, other, 0)
    return f"{how}: {one} and {other}"


def processes_die_and_start(machine: ClusterMachine, chance: Random) -> str:
    name = chance.choice(NAMES)
    if name in machine.world.processes:
        machine.world.kill(name)
        return f"{name} dies"
    machine.world.start(name)
    return f"{name} starts"


def wanted_worker_starts(machine: ClusterMachine, chance: Random) -> str | None:
    """A worker that the coordinator has asked for starts, and may be up before all know it."""
    if not machine.world.start_wanted():
        return None
    machine.progress(chance.randint(0, 3))
    return "one more"


def death_is_noticed(machine: ClusterMachine, chance: Random) -> str | None:
    if not machine.world.pending_deaths:
        return None
    survivor, dead = chance.choice(sorted(machine.world.pending_deaths))
    machine.world.tell_death(survivor, dead)
    return f"{survivor} notices the death of {dead}"


def worker_is_drained(machine: ClusterMachine, chance: Random) -> str | None:
    if not machine.workers:
        return None
    name = chance.choice(machine.workers)
    machine.world.drain(name)
    return name


def memory_changes(machine: ClusterMachine, chance: Random) -> str | None:
    if not machine.workers:
        return None
    name, num_blocks = chance.choice(machine.workers), chance.randint(0, machine.world.num_blocks)
    machine.world.limit_memory(name, num_blocks)
    return f"{num_blocks} blocks on {name}"


def peers_err(machine: ClusterMachine, chance: Random) -> str | None:
    """A live process is considered dead, and fenced or found again."""
    name = chance.choice(NAMES)
    if name not in machine.world.processes:
        return None
    if name in (COORDINATOR, *GATEWAYS) and machine.workers and chance.random() < 0.6:
        worker = chance.choice(machine.workers)
        machine.world.meet_again(name, worker)
        return f"{name} loses and finds {worker}"
    machine.world.rejoin(name)
    return f"{name} rejoins"


RULES: Rules = {
    clients_come: 3,
    all_goes_on: 4,
    time_passes: 3,
    client_leaves: 1,
    messages_misbehave: 3,
    repeats_arrive: 2,
    one_engine_works: 4,
    requests_move: 4,
    roles_change: 1,
    workers_part: 1,
    processes_die_and_start: 1,
    wanted_worker_starts: 4,
    death_is_noticed: 2,
    worker_is_drained: 1,
    memory_changes: 1,
    peers_err: 1,
}
