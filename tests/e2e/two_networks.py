"""Two hosts with keys in two network namespaces: ``unshare --net python -m tests.e2e.two_networks FOLDER MODEL``."""

import asyncio
import sys
from pathlib import Path

from tests.e2e.clients import Clients
from tests.e2e.hosts import CONFIG, NO_OWN_MOVES, Hosts, hosts_running, metric_of_host, wait_busy
from tests.e2e.link import Link
from tests.e2e.operator import Console
from tests.e2e.server import wait_until

NUM_STREAMS = 6
MAX_TOKENS = 150
DELAY_S, LOSS = 0.005, 0.01
SLOW_BYTES_PER_S = 250_000.0
CUT_S = 4.0  # longer than death_after_s, so that both sides count the other as dead
NUM_MOVES = 5
DEADLINE_S = 120.0
SHARES = {"alpha": "gateways = 1\nworkers = 1", "beta": "workers = 2"}


async def scenario(hosts: Hosts, link: Link) -> None:
    """Streams over the link, while requests move, a host is drained, and the link is slow, cut and healed."""
    alpha, console = hosts.hosts["alpha"], Console(hosts.runtime_dirs["alpha"])
    await asyncio.to_thread(alpha.wait_workers, 3)
    clients = Clients(alpha, NUM_STREAMS, MAX_TOKENS)
    await clients.learn()
    link.delay_s, link.loss = DELAY_S, LOSS
    async with clients.running():
        await asyncio.to_thread(wait_busy, alpha, "beta")

        def num_moved() -> float:
            return metric_of_host(alpha, "actorserve_migrations_total", "alpha")

        least = num_moved() + NUM_MOVES
        hosts.restless(True)
        await asyncio.to_thread(wait_until, lambda: num_moved() >= least, "moves over the link", DEADLINE_S)
        hosts.restless(False)

        await console.ask("drain", "beta", "--wait", "--wait-s", str(DEADLINE_S / 3))
        await console.ask("uncordon", "beta")
        await asyncio.to_thread(wait_busy, alpha, "beta")

        link.bytes_per_s = SLOW_BYTES_PER_S
        done = clients.num_answers
        await asyncio.to_thread(
            wait_until, lambda: clients.num_answers >= done + NUM_STREAMS, "answers over a slow link", DEADLINE_S
        )
        link.bytes_per_s = None

        link.is_cut = True
        await asyncio.sleep(CUT_S)
        link.is_cut = False
        await asyncio.to_thread(alpha.wait_workers, 3)
        await asyncio.to_thread(wait_busy, alpha, "beta")
    assert link.num_lost > 0.002 * link.num_carried > 0.0


def main() -> None:
    folder, model = map(Path, sys.argv[1:])
    link = Link()
    try:
        config = (CONFIG + NO_OWN_MOVES).replace("death_after_s = 1.5", "death_after_s = 2.0").format(model=model)
        with hosts_running(folder, config, SHARES, keys=True, prefixes={"beta": link.prefix}) as hosts:
            asyncio.run(scenario(hosts, link))
    finally:
        link.close()


if __name__ == "__main__":
    main()
