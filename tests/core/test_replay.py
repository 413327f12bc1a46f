"""Replay: a core's inputs, given to a fresh core, lead to the same effects."""

from tests.core.world.world import COORDINATOR, World


def test_every_core_is_a_function_of_what_it_was_told() -> None:
    """After deaths, losses and repeats, each process's log replayed into a fresh core gives equal effects."""
    world = World(num_workers=2, num_gateways=2)
    for number in range(8):
        world.open(f"r{number}", (*range(20, 29), *range(number)), max_tokens=12, gateway=f"gateway-{number % 2}")
    for turn in range(30):
        world.progress()
        world.advance(0.2)
        if world.links:
            link = sorted(world.links)[turn % len(world.links)]
            if turn % 3:
                world.deliver(link, keep=True)
            else:
                world.drop(link)
        if turn == 8:
            world.kill("worker-0")
            world.kill(COORDINATOR)
        if turn == 12:
            world.start(COORDINATOR)
            world.start("worker-0")
        if turn == 20:
            world.close("r3")
            world.kill("gateway-1")
    world.settle()
    assert sum(len(process.log) for process in world.lives) > 300
    for process in world.lives:
        core = world.make(process.peer).core
        for now, sender, message, effects in process.log:
            assert core.handle(message, now, sender) == effects
