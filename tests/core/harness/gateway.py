"""A gateway's sessions for scenarios: one request r, a coordinator, and workers A and B."""

from actorserve.core.effects import Effect, Send
from actorserve.core.gateway.config import GatewayConfig
from actorserve.core.gateway.state import GatewayState
from actorserve.core.messages import (
    Attained,
    Message,
    ModelInfo,
    Open,
    Peer,
    PeerUp,
    Place,
    Placed,
    RequestSpec,
    Role,
    SamplingParams,
    Start,
    Started,
    TokenLogprobs,
    Tokens,
    WantReports,
    WorkerInfo,
)

COORDINATOR = Peer("coordinator", 1)
A = Peer("worker-0", 1)
B = Peer("worker-1", 1)
MODEL = ModelInfo("m", 100, 1000)
SPEC = RequestSpec("r", (1, 2, 3), SamplingParams(seed=5, max_tokens=10))


class Gateway:
    """Drives a GatewayState, whose invariants are checked after each message.

    ``wanted`` are the workers that were asked for reports, or not to report any more, in the order of the messages.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self.state = GatewayState(config)
        self.wanted: list[tuple[Peer, bool]] = []

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        effects = self.state.handle(message, now, sender)
        self.state.validate()
        others: list[Effect] = []
        for effect in effects:
            match effect:
                case Send(to=to, message=WantReports(wanted=wanted)):
                    self.wanted.append((to, wanted))
                case _:
                    others.append(effect)
        return others


def make_gateway(no_instance_timeout_s: float = 30.0, resume_timeout_s: float = 600.0) -> Gateway:
    """Sessions that have met no peer; they retry after 1 s."""
    return Gateway(GatewayConfig(1.0, no_instance_timeout_s, resume_timeout_s))


def up(peer: Peer, kind: str = "k") -> PeerUp:
    return PeerUp(peer, Role.WORKER, WorkerInfo(kind, MODEL))


def tokens(epoch: int, position: int, token: int, logprobs: tuple[TokenLogprobs, ...] = ()) -> Tokens:
    """One token of r."""
    return Tokens(("r",), (epoch,), (position,), (token,), logprobs)


def start(epoch: int, output: tuple[int, ...] = (), waited_s: float = 0.0, age_s: float | None = None) -> Start:
    """What starts r with this output."""
    request = RequestSpec("r", (1, 2, 3), SPEC.sampling, output_token_ids=output)
    return Start(epoch, request, Attained(waited_s=waited_s, age_s=waited_s if age_s is None else age_s))


def opened(*workers: Peer) -> Gateway:
    """Sessions that know the coordinator and ``workers``; r waits for the coordinator's answer."""
    gateway = make_gateway()
    gateway.handle(PeerUp(COORDINATOR, Role.COORDINATOR), 0.0)
    for worker in workers:
        gateway.handle(up(worker), 0.0)
    assert gateway.handle(Open(SPEC), 0.0) == [Send(COORDINATOR, Place("r", 1, 3))]
    return gateway


def running(*workers: Peer) -> Gateway:
    """Like ``opened``, with r running on worker A under epoch 1."""
    gateway = opened(*workers)
    assert gateway.handle(Placed("r", 1, A), 0.0, COORDINATOR) == [Send(A, start(1))]
    assert gateway.handle(Started("r", 1), 0.0, A) == []
    return gateway
