"""The cluster that random histories happen to: its shapes, its steps, and how a history ends."""

from collections.abc import Callable, Mapping, Sequence
from random import Random

from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.cluster.scaling import ScalingConfig
from actorserve.core.gateway.session import Session
from actorserve.core.gateway.state import GatewayState
from actorserve.core.instance.state import InstanceState
from actorserve.core.kv.layer_groups import ONE_GROUP, LayerGroups
from actorserve.core.messages import InstanceRole, Message
from actorserve.core.migration.config import MigrationMode
from actorserve.core.migration.pairing import PairingConfig
from actorserve.core.scheduling.policies import make_policy
from actorserve.core.scheduling.swapping import SwapMode
from tests.core.faults.seen import Seen
from tests.core.world.parts import GRAMMARS, RETRY_S, Scheduling
from tests.core.world.world import CLUSTER, COORDINATOR, Link, World

GATEWAYS = ("gateway-0", "gateway-1")
WORKERS = ("worker-0", "worker-1", "worker-2")
NAMES = (COORDINATOR, *WORKERS, *GATEWAYS)
STEMS = tuple((first, *range(11, 26)) for first in (1, 2))
"""What prompts begin with, so that requests share blocks; after its first block one stem goes on as the other."""
LONG_STEMS = tuple((first, *range(11, 70)) for first in (1, 2))
"""For layers with windows: a request has many more rows than a window at a time."""

SCHEDULINGS = [
    Scheduling(
        lambda times, name=name: make_policy(name, times),  # type: ignore[misc]
        mode,
        num_host_blocks,
        migration,
        checkpoint_tokens,
        layer_groups,
    )
    for layer_groups in (ONE_GROUP, LayerGroups(1, 2, window=6))
    for name, mode, num_host_blocks, migration, checkpoint_tokens in (
        ("fcfs", SwapMode.PROACTIVE, 0, MigrationMode.LIVE, 0),
        ("skip_join_mlfq", SwapMode.PROACTIVE, 40, MigrationMode.LIVE, 4),
        ("skip_join_mlfq", SwapMode.PROACTIVE, 3, MigrationMode.LIVE, 0),
        ("skip_join_mlfq", SwapMode.REACTIVE, 40, MigrationMode.LIVE, 8),
        ("shortest_expected", SwapMode.PROACTIVE, 8, MigrationMode.LIVE, 4),
        ("skip_join_mlfq", SwapMode.RECOMPUTE, 40, MigrationMode.LIVE, 4),
        ("skip_join_mlfq", SwapMode.RECOMPUTE, 0, MigrationMode.BLOCKING, 0),
        ("fcfs", SwapMode.REACTIVE, 24, MigrationMode.LIVE, 4),
        ("srpt", SwapMode.PROACTIVE, 8, MigrationMode.RECOMPUTE, 0),
    )
]
PAIRING = PairingConfig(source_below=10.0, source_until=14.0, destination_above=18.0, ttl_s=2 * RETRY_S, rest_s=0.5)
SCALING = ScalingConfig(
    len(WORKERS), scale_out_below=12.0, scale_in_above=24.0, hold_s=RETRY_S / 4, start_timeout_s=2 * RETRY_S
)
CLUSTERS = (
    CLUSTER,
    ClusterConfig(100, RETRY_S, promote_after_s=RETRY_S, migration=PAIRING, scaling=SCALING),
    ClusterConfig(100, RETRY_S, promote_after_s=RETRY_S, migration=PAIRING, checkpoints=True),
    ClusterConfig(100, RETRY_S, promote_after_s=RETRY_S, migration=PAIRING, max_queue_per_instance=1),
)

Rule = Callable[["ClusterMachine", Random], str | None]
"""Lets something happen, and says what. None: it cannot happen now."""
Rules = Mapping[Rule, int]
"""Each rule's weight."""


class ClusterMachine:
    """Clients come and leave, messages are late, lost and repeated, and processes die, in any order."""

    def __init__(self, rules: Rules, seen: Seen) -> None:
        self.trace: list[str] = []
        self._rules = rules
        self._seen = seen
        self._weights: list[int] = []
        self._num_opened = 0

    def begin(self, chance: Random) -> None:
        """Memory is too small for all requests, so that some are preempted, or large enough for another worker's."""
        scheduling = chance.choice(SCHEDULINGS)
        has_windows, is_small = scheduling.layer_groups.num_windowed > 0, chance.random() < 0.5
        self.stems = LONG_STEMS if has_windows else STEMS
        self._seen.begin()
        self.world = World(
            num_workers=len(WORKERS),
            num_gateways=len(GATEWAYS),
            num_blocks=((30 if has_windows else 12) if is_small else 48),
            max_batch_tokens=4 if has_windows else 8,
            scheduling=scheduling,
            cluster=chance.choice(CLUSTERS),
            watchers=[self._seen],
        )
        # Each history has its own mixture of rules, because some events follow only if others do not interfere.
        self._weights = [weight * chance.choice((0, 1, 2, 4)) for weight in self._rules.values()]
        if chance.random() < 0.5:
            for worker, role in zip(WORKERS, InstanceRole, strict=True):
                self.world.set_role(worker, role)
            self.progress(1)
        for number, worker in enumerate(WORKERS):
            self.world.checkpoint(worker, WORKERS[number - 1])
        self.open(chance, self.world.num_blocks + 12, 8)
        self.progress(chance.randint(2, 8))

    def step(self, chance: Random) -> None:
        """The first of a few rules that can happen now, or progress."""
        for rule in chance.choices(list(self._rules), [weight + 1 for weight in self._weights], k=8):
            what = rule(self, chance)
            if what is not None:
                self.trace.append(f"{rule.__name__}: {what}")
                return
        self.trace.append("progress")
        self.progress(1)

    def end(self) -> None:
        """No more faults. Each client gets its answer, and nothing is held for any request."""
        world = self.world
        for name in NAMES:
            if name not in world.processes:
                world.start(name)
        for name in WORKERS:
            world.limit_memory(name, world.num_blocks)
        world.settle()
        for client in world.clients.values():
            if not client.closed:
                assert client.end is not None
                assert client.end.refusal is None, client.end
                client.check()
        world.check_at_rest()

    # --- what rules do and ask ---------------------------------------------------------------------------------------

    def open(self, chance: Random, max_tokens: int, max_count: int) -> None:
        """Up to ``max_count`` clients come."""
        gateways = [name for name in GATEWAYS if name in self.world.processes]
        for _ in range(chance.randint(1, max_count) if gateways else 0):
            stem = chance.choice(self.stems)
            rest = (chance.randint(0, 49) for _ in range(chance.randint(1, 8)))
            self._num_opened += 1
            self.world.open(
                f"r{self._num_opened}",
                (*stem[: chance.randint(0, len(stem))], *rest),
                max_tokens,
                chance.choice(gateways),
                cache_salt=chance.choice(("", "", "tenant")),
                prompt_logprobs=chance.choice((-1, -1, 0, 2)),
                grammar=chance.choice(("", "", "", "", *GRAMMARS)),
                priority=chance.choice((0, 0, 1, 2)),
            )

    def progress(self, rounds: int, *, talks: int = 1, **what: bool) -> None:
        """As ``World.progress``, for so many rounds."""
        for _ in range(rounds):
            self.world.progress(talks=talks, **what)

    @property
    def workers(self) -> list[str]:
        """The workers that run."""
        return [name for name in WORKERS if name in self.world.processes]

    @property
    def links(self) -> list[Link]:
        return sorted(self.world.links)

    def in_flight(self, *kinds: type[Message]) -> list[tuple[Link, int]]:
        """The links that have messages of these kinds, and the places there."""
        return [
            (link, index)
            for link in self.links
            for index, message in enumerate(self.world.links[link])
            if isinstance(message, kinds)
        ]

    @property
    def sessions(self) -> Sequence[tuple[str, Session]]:
        """The sessions of all gateways, with the gateway's name."""
        return [
            (name, session)
            for name in GATEWAYS
            if name in self.world.processes and isinstance(core := self.world.processes[name].core, GatewayState)
            for session in core.sessions.values()
        ]

    def worker(self, name: str) -> InstanceState:
        core = self.world.processes[name].core
        assert isinstance(core, InstanceState)
        return core

    def tear_fetch(self, name: str) -> None:
        self.world.tear_fetch(name)
        self._seen.counts["torn read"] += self.world.processes[name].num_read > 0

    def seen(self, what: str) -> None:
        """Count something that only a rule knows."""
        self._seen.counts[what] += 1
