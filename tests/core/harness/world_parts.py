"""The parts of a world: its processes, how they schedule, and its clients."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from actorserve.core.cluster.state import ClusterState
from actorserve.core.effects import Effect, End, Fetch, SwapIn, SwapOut
from actorserve.core.gateway.state import GatewayState
from actorserve.core.instance.state import InstanceState
from actorserve.core.messages import FinishReason, Message, Peer, PeerUp, PromptLogprobs, RequestSpec, Role
from actorserve.core.migration.config import MigrationMode
from actorserve.core.scheduling.policy import FirstComeFirstServed, SchedulingPolicy
from actorserve.core.scheduling.swapping import SwapMode
from actorserve.core.timing.step_times import StepTimes
from workers.engines.fake_engine import FakeEngine, expected_scores

VOCAB_SIZE = 50


@dataclass
class Process:
    """One incarnation of a process: its core, and the peers that it has met."""

    peer: Peer
    role: Role
    core: GatewayState | ClusterState | InstanceState
    met: dict[Peer, PeerUp] = field(default_factory=dict)
    log: list[tuple[float, Peer | None, Message, list[Effect]]] = field(default_factory=list)
    engine: FakeEngine | None = None
    commands: deque[Effect] = field(default_factory=deque)  # for the engine; a step waits until the test finishes it
    copies: deque[SwapOut | SwapIn] = field(default_factory=deque)  # wait like steps
    fetches: deque[Fetch] = field(default_factory=deque)  # wait like steps
    drained: bool = False


@dataclass(frozen=True)
class Scheduling:
    """How the workers of a world schedule."""

    make_policy: Callable[[StepTimes], SchedulingPolicy] = lambda times: FirstComeFirstServed()
    swap_mode: SwapMode = SwapMode.PROACTIVE
    num_host_blocks: int = 0
    migration: MigrationMode = MigrationMode.LIVE
    checkpoint_tokens: int = 0


FIRST_COME_FIRST_SERVED = Scheduling()


@dataclass
class Client:
    """What a client has seen of its request."""

    spec: RequestSpec
    gateway: Peer
    expected: list[int]
    tokens: list[int] = field(default_factory=list)
    scores: list[PromptLogprobs] = field(default_factory=list)
    end: End | None = None
    closed: bool = False

    def check(self) -> None:
        """Raises: AssertionError if something came twice, out of order, or not as the fake engine defines it."""
        assert self.tokens == self.expected[: len(self.tokens)], (
            "a wrong token, a repeated token, or tokens out of order"
        )
        if self.end and self.end.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert self.tokens == self.expected, "ended before its last token"
        wants_scores = self.spec.sampling.prompt_logprobs >= 0 and bool(self.tokens)
        expected = [expected_scores(self.spec, VOCAB_SIZE)] if wants_scores else []
        assert self.scores == expected, "the prompt's log-probabilities do not come once, whole, with token 0"
