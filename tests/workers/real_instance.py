"""An instance's core and a real engine, which run one iteration at a time."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from math import inf
from typing import Any

from actorserve.core.effects import AddToEngine, DropFromEngine, Fetch, RunStep, Send, SwapIn, SwapOut
from actorserve.core.instance.config import InstanceConfig
from actorserve.core.instance.state import InstanceState
from actorserve.core.messages import (
    CopyDone,
    Finished,
    FinishReason,
    GrammarReady,
    HandOver,
    Message,
    Peer,
    PromptLogprobs,
    RequestSpec,
    Start,
    StepPlan,
    Tick,
    TokenLogprobs,
    Tokens,
)
from actorserve.core.scheduling.policies import make_policy
from actorserve.core.timing.step_times import StepTimes
from tests.core.harness.driver import PROFILE
from tests.workers.workloads import CopyPace
from workers.engine import Engine
from workers.kv_transfer.transfer import KVTransfer
from workers.sampling.grammars import PreparedGrammar

GATEWAY = Peer("gateway-0", 1)
Answer = list[tuple[int, TokenLogprobs | None, PromptLogprobs | None]]


@dataclass
class Copy:
    """A copy in flight: issued, with no CopyDone yet."""

    effect: SwapOut | SwapIn | Fetch
    pace: CopyPace
    num_steps: int = 0
    is_made: bool = False


class Instance:
    """An InstanceState and a real engine, one iteration at a time."""

    def __init__(
        self,
        config: InstanceConfig,
        engine: Engine,
        policy: str = "fcfs",
        paces: Sequence[CopyPace] = (),
        transfer: KVTransfer | None = None,
    ) -> None:
        times = StepTimes(PROFILE)
        self.state = InstanceState(config, make_policy(policy, times), times)
        self.answers: dict[str, Answer] = {}
        self.ended: set[str] = set()
        self.outbox: list[tuple[Peer, Message]] = []  # to other instances, and hand-over requests to the gateway
        self.fetches: list[Copy] = []
        self._engine = engine
        self._transfer = transfer
        self._commands: deque[StepPlan | Callable[[], None]] = deque()
        self._compiling: deque[tuple[str, PreparedGrammar]] = deque()
        self._copies: deque[Copy] = deque()  # in order of issue, which is also the order of completion
        self._paces = cycle(paces)
        self._now = 0.0

    @property
    def is_copying(self) -> bool:
        return bool(self._copies)

    def tell(self, message: Message, sender: Peer = GATEWAY) -> None:
        for effect in self.state.handle(message, self._now, sender):
            match effect:
                case Send(message=Tokens() as tokens):
                    logprobs = tokens.logprobs or (None,) * len(tokens.request_ids)
                    scores = tokens.prompt_logprobs or (None,) * len(tokens.request_ids)
                    rows = zip(tokens.request_ids, tokens.token_ids, logprobs, scores, strict=True)
                    for request_id, token_id, logprob, score in rows:
                        self.answers.setdefault(request_id, []).append((token_id, logprob, score))
                case Send(message=Finished(request_id=request_id, reason=reason)):
                    assert reason is FinishReason.LENGTH
                    self.ended.add(request_id)
                case Send(to=to, message=sent) if to != GATEWAY or isinstance(sent, HandOver):
                    self.outbox.append((to, sent))
                case AddToEngine(request=request):
                    grammar = self._engine.prepare(request)
                    self._commands.append(partial(self._engine.add, request, grammar))
                    if grammar is not None:
                        self._compiling.append((request.request_id, grammar))
                case DropFromEngine(request_id=request_id):
                    self._commands.append(partial(self._engine.drop, request_id))
                case RunStep(plan=plan):
                    self._commands.append(plan)
                case SwapOut() | SwapIn():
                    self._copies.append(Copy(effect, next(self._paces)))
                case Fetch():
                    self.fetches.append(Copy(effect, next(self._paces)))

    def step(self, duration_s: float) -> None:
        """Run the engine's commands up to the end of one iteration, which takes ``duration_s``, and the copies that are
        due. If only copies are in flight, finish the next one. Afterwards at most one grammar is ready.
        """
        for copy in self._copies:
            if not copy.pace.early and not copy.is_made:
                break  # later copies wait for this one
            self._make(copy)
        self._now += duration_s
        if self.state.steps.next_plan_s is not None:  # the next iteration is planned before this one has ended
            self._now = max(self._now, self.state.steps.next_plan_s)
            self.tell(Tick())
        is_idle = True
        while self._commands and is_idle:
            match self._commands.popleft():
                case StepPlan() as plan:
                    done = replace(self._engine.begin(plan).result(), duration_s=duration_s)
                    is_idle = False
                case command:
                    command()
        for copy in self._copies:
            copy.num_steps += 1
        while self._copies and (is_idle or self._copies[0].num_steps > self._copies[0].pace.num_steps):
            copy = self._copies.popleft()
            self._make(copy)
            self.tell(CopyDone(copy.effect.copy_id, duration_s=1e-4))
            if is_idle:
                break
        if not is_idle:
            self.tell(done)
        if self._compiling:
            request_id, grammar = self._compiling.popleft()
            grammar.exception(timeout=60)
            self.tell(GrammarReady(request_id))

    def fetch(self) -> int:
        """Make the copies from the other instance that are due, and report the finished ones to the core.

        Returns how many of their blocks were found here, and so not copied.
        """
        num_skipped = 0
        for copy in list(self.fetches):
            is_done = copy.num_steps >= copy.pace.num_steps
            if copy.pace.early or is_done:
                self._make(copy)
            if is_done:
                assert isinstance(copy.effect, Fetch)
                num_skipped += copy.effect.num_skipped
                self.fetches.remove(copy)
                self.tell(CopyDone(copy.effect.copy_id, duration_s=1e-4))
            copy.num_steps += 1
        return num_skipped

    def _make(self, copy: Copy) -> None:
        if copy.is_made:
            return
        copy.is_made = True
        match copy.effect:
            case SwapOut(device_blocks=device_blocks, host_blocks=host_blocks):
                self._engine.copy_out(device_blocks, host_blocks)
            case SwapIn(host_blocks=host_blocks, device_blocks=device_blocks):
                self._engine.copy_in(host_blocks, device_blocks)
            case Fetch():
                assert self._transfer is not None
                self._transfer.fetch(copy.effect)


def config(engine: Engine, **changes: Any) -> InstanceConfig:
    usual = InstanceConfig(
        num_blocks=engine.num_blocks,
        tokens_per_block=engine.tokens_per_block,
        bytes_per_block=engine.bytes_per_block,
        max_context_tokens=engine.model.max_tokens,
        layer_groups=engine.layer_groups,
        max_batch_requests=8,
        max_batch_tokens=512,
        load_report_s=1.0,
        retry_s=1.0,
        tpot_target_s=inf,
        prefix_cache=False,
    )
    return replace(usual, **changes)


def answer_alone(engine: Engine, spec: RequestSpec) -> Answer:
    """A request's answer alone, with its prompt in one chunk and no cached prefix."""
    instance = Instance(config(engine), engine)
    instance.tell(Start(1, spec))
    while spec.request_id not in instance.ended:
        instance.step(0.01)
    return instance.answers[spec.request_id]
