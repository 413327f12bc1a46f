"""The parts of a world: its processes, how they schedule, and its clients."""

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import inf

from actorserve.core.cluster.state import ClusterState
from actorserve.core.effects import AddToEngine, DropFromEngine, Effect, End, Fetch, RunStep, SwapIn, SwapOut
from actorserve.core.gateway.state import GatewayState
from actorserve.core.instance.config import InstanceConfig
from actorserve.core.instance.state import InstanceState
from actorserve.core.kv.layer_groups import ONE_GROUP, LayerGroups
from actorserve.core.messages import (
    FinishReason,
    GrammarReady,
    Message,
    Peer,
    PeerUp,
    PromptLogprobs,
    RequestSpec,
    Role,
    StepDone,
    StepPlan,
)
from actorserve.core.migration.config import MigrationConfig, MigrationMode
from actorserve.core.scheduling.policy import FirstComeFirstServed, SchedulingPolicy
from actorserve.core.scheduling.swapping import SwapMode
from actorserve.core.timing.step_times import StepTimes
from actorserve.model_files.grammars import GrammarCompiler
from tests.core.harness.driver import PROFILE
from workers.engines.fake_choice import compiler_of_bytes
from workers.engines.fake_engine import FAKE_MODEL, FakeEngine, expected_entries, expected_scores, expected_tokens
from workers.sampling.grammars import PreparedGrammar

VOCAB_SIZE = 50
TOKENS_PER_BLOCK = 4
STOP_TOKEN = 7
RETRY_S = 1.0
KEY = bytes.fromhex("5eed")  # of every worker's tickets
EngineCommand = AddToEngine | DropFromEngine | RunStep
GRAMMARS = tuple(
    json.dumps({"grammars": [{"lark_grammar": lark}]})
    for lark in ('start: ("!" | "##" /[%-+]/)*', "start: /[!-1]{3,9}/", 'start: "!!" "z"', "start: (")
)
"""One may go on, one must end soon, one can get only two tokens (the vocabulary has no z), and one is invalid."""


@cache
def _compiler() -> GrammarCompiler:
    return compiler_of_bytes(VOCAB_SIZE)


def make_engine(num_blocks: int, num_host_blocks: int = 0, layer_groups: LayerGroups = ONE_GROUP) -> FakeEngine:
    """The engine of a worker in a world, with pools for the same numbers of tokens whatever the layer groups are."""
    return FakeEngine(
        replace(FAKE_MODEL, vocab_size=VOCAB_SIZE),
        num_blocks=num_blocks * layer_groups.num_groups,
        tokens_per_block=TOKENS_PER_BLOCK,
        num_host_blocks=num_host_blocks * layer_groups.num_groups,
        make_compiler=_compiler,
        layer_groups=layer_groups,
    )


def expected_answer(spec: RequestSpec, num_blocks: int) -> tuple[list[int], bool]:
    """The tokens of the answer with its stop token, and whether the request then fails because of its grammar."""
    num_tokens = min(spec.sampling.max_tokens, num_blocks * TOKENS_PER_BLOCK - len(spec.prompt_token_ids))
    if spec.sampling.grammar:
        return _undisturbed(spec, num_blocks, num_tokens)
    tokens = expected_tokens(spec, VOCAB_SIZE, num_tokens)
    return (tokens[: tokens.index(STOP_TOKEN) + 1] if STOP_TOKEN in tokens else tokens), False


def _undisturbed(spec: RequestSpec, num_blocks: int, num_tokens: int) -> tuple[list[int], bool]:
    """As ``expected_answer``, from an engine that serves nothing else."""
    engine = make_engine(num_blocks)
    engine.add(spec, engine.prepare(spec))
    tokens: list[int] = []
    start, fed = 0, spec.prompt_token_ids
    while len(tokens) < num_tokens and STOP_TOKEN not in tokens:
        done = engine.begin(
            StepPlan(0, (spec.request_id,), (start,), (fed,), (tuple(range(num_blocks)),), (True,))
        ).result()
        if done.failed:
            return tokens, True
        tokens += done.token_ids
        start, fed = start + len(fed), done.token_ids
    return tokens, False


@dataclass
class Process:
    """One incarnation of a process: its core, and the peers that it has met."""

    peer: Peer
    role: Role
    core: GatewayState | ClusterState | InstanceState
    met: dict[Peer, PeerUp] = field(default_factory=dict)
    log: list[tuple[float, Peer | None, Message, list[Effect]]] = field(default_factory=list)
    engine: FakeEngine | None = None
    commands: deque[EngineCommand] = field(default_factory=deque)  # a step waits until the test finishes it
    _grammars: deque[PreparedGrammar | None] = field(default_factory=deque)  # of each command
    copies: deque[SwapOut | SwapIn] = field(default_factory=deque)  # wait like steps
    fetches: deque[Fetch] = field(default_factory=deque)  # wait like steps
    num_read: int = 0  # blocks of the oldest fetch that were read already
    compiling: list[tuple[str, PreparedGrammar]] = field(default_factory=list)  # by request id; they wait like steps
    ready: set[str] = field(default_factory=set)  # requests whose GrammarReady was told
    computed: StepDone | None = None  # of the oldest step, if the engine has ended it and the core does not know
    drained: bool = False
    num_ahead: int = 0  # steps that were planned while another one was in flight

    @property
    def follows(self) -> bool:
        """Whether it can follow other workers' iterations. One worker is of an older protocol, and cannot."""
        return self.peer.name != "worker-2"

    def command(self, effect: EngineCommand) -> None:
        """Queue a command of the engine, and let the engine take its commands up to the next step."""
        assert self.engine is not None
        grammar = None
        match effect:
            case AddToEngine(request=request):
                grammar = self.engine.prepare(request)
                if grammar is not None:
                    self.compiling.append((request.request_id, grammar))
            case RunStep(plan=plan):
                in_flight = [command.plan for command in self.commands if isinstance(command, RunStep)]
                assert len(in_flight) < 2, "three steps in flight"
                self.num_ahead += len(in_flight)
                waiting = {request_id for request_id, _ in self.compiling} - self.ready
                assert not waiting.intersection(plan.request_ids), "a step names a request whose grammar is not ready"
        self.commands.append(effect)
        self._grammars.append(grammar)
        self.run_commands()

    def run_commands(self) -> None:
        """Let the engine take its commands up to the next step."""
        assert self.engine is not None
        while self.commands and not isinstance(self.commands[0], RunStep):
            grammar = self._grammars.popleft()
            match self.commands.popleft():
                case AddToEngine(request=request):
                    self.engine.add(request, grammar)
                case DropFromEngine(request_id=request_id):
                    self.engine.drop(request_id)

    def compute(self) -> None:
        """The engine ends the oldest step, if it has not done that already."""
        assert self.engine is not None
        command = self.commands[0]
        assert isinstance(command, RunStep)
        self.computed = self.computed or self.engine.begin(command.plan).result()

    def step(self) -> StepDone:
        """The step in flight ends."""
        self.compute()
        self._grammars.popleft()
        self.commands.popleft()
        done, self.computed = self.computed, None
        assert done is not None
        self.run_commands()
        return done

    def compile(self, index: int) -> GrammarReady:
        """One of the grammars that are being compiled is ready."""
        request_id, grammar = self.compiling.pop(index)
        grammar.exception(timeout=60)
        self.ready.add(request_id)
        return GrammarReady(request_id)


@dataclass(frozen=True)
class Scheduling:
    """How the workers of a world schedule."""

    make_policy: Callable[[StepTimes], SchedulingPolicy] = lambda times: FirstComeFirstServed()
    swap_mode: SwapMode = SwapMode.PROACTIVE
    num_host_blocks: int = 0
    migration: MigrationMode = MigrationMode.LIVE
    checkpoint_tokens: int = 0
    layer_groups: LayerGroups = ONE_GROUP


FIRST_COME_FIRST_SERVED = Scheduling()


def make_worker(peer: Peer, scheduling: Scheduling, num_blocks: int, max_batch_tokens: int) -> Process:
    """A fresh worker with ``num_blocks`` blocks for each layer group."""
    engine = make_engine(num_blocks, scheduling.num_host_blocks, scheduling.layer_groups)
    config = InstanceConfig(
        num_blocks=engine.num_blocks,
        tokens_per_block=engine.tokens_per_block,
        bytes_per_block=engine.bytes_per_block,
        max_context_tokens=engine.model.max_tokens,
        layer_groups=engine.layer_groups,
        max_batch_requests=4,
        max_batch_tokens=max_batch_tokens,
        load_report_s=0.5,
        retry_s=RETRY_S,
        tpot_target_s=inf,
        num_host_blocks=engine.num_host_blocks,
        swap_mode=scheduling.swap_mode,
        migration=MigrationConfig(scheduling.migration, KEY.hex(), timeout_s=RETRY_S),
        checkpoint_tokens=scheduling.checkpoint_tokens,
    )
    times = StepTimes(PROFILE)
    core = InstanceState(config, scheduling.make_policy(times), times)
    return Process(peer, Role.WORKER, core, engine=engine)


@dataclass
class Client:
    """What a client has seen of its request. It must see the tokens ``expected``; then the request ``fails`` or not."""

    spec: RequestSpec
    gateway: Peer
    expected: list[int]
    fails: bool = False
    tokens: list[int] = field(default_factory=list)
    scores: list[PromptLogprobs] = field(default_factory=list)
    end: End | None = None
    closed: bool = False

    @cached_property
    def kv_entries(self) -> list[int]:
        """The KV that the fake engine must have for each token of the prompt and the answer."""
        return expected_entries([*self.spec.prompt_token_ids, *self.expected])

    @cached_property
    def _expected_scores(self) -> list[PromptLogprobs]:
        return [expected_scores(self.spec, VOCAB_SIZE)]

    def check(self) -> None:
        """Raises: AssertionError if something came twice, out of order, or not as the fake engine defines it."""
        assert self.tokens == self.expected[: len(self.tokens)], (
            "a wrong token, a repeated token, or tokens out of order"
        )
        if self.end and self.end.refusal is None:
            assert self.tokens == self.expected, "ended before its last token"
            assert self.fails == (self.end.reason is FinishReason.ERROR), "a wrong end"
        wants_scores = self.spec.sampling.prompt_logprobs >= 0 and bool(self.tokens)
        assert self.scores == (self._expected_scores if wants_scores else []), (
            "the prompt's log-probabilities do not come once, whole, with token 0"
        )
