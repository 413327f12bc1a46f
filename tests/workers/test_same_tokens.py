"""The same tokens: whatever the scheduler does, a request gets bit for bit the tokens that it gets alone."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from math import inf
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from actorserve.core.effects import AddToEngine, DropFromEngine, Effect, Fetch, RunStep, Send, SwapIn, SwapOut
from actorserve.core.instance.config import InstanceConfig
from actorserve.core.instance.state import InstanceState
from actorserve.core.messages import (
    CopyDone,
    Finished,
    FinishReason,
    HandOver,
    Message,
    Peer,
    Release,
    RequestSpec,
    SamplingParams,
    Start,
    TokenLogprobs,
    Tokens,
)
from actorserve.core.scheduling.policies import make_policy
from actorserve.core.scheduling.swapping import SwapMode
from actorserve.core.timing.step_times import StepTimes
from tests.core.harness.driver import PROFILE
from workers.engine import Engine
from workers.engine_options import EngineOptions
from workers.engines.torch_engine import TorchEngine
from workers.kv_transfer.transfer import KVTransfer

GATEWAY = Peer("gateway-0", 1)
VOCAB_SIZE = 211
TOKENS_PER_BLOCK = 8
NUM_HOST_BLOCKS = 12
MAX_STEPS = 5000  # far more than any workload takes
STEMS = tuple((*[first] * TOKENS_PER_BLOCK, *range(50, 90)) for first in (1, 2))
"""Beginnings of prompts, so that requests share blocks. The two stems differ only in their first block."""

Answer = list[tuple[int, TokenLogprobs | None]]


@dataclass(frozen=True)
class Client:
    """A client sends its request at ``asks_at_step``, and leaves ``patience_steps`` later if it has no full answer."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str
    asks_at_step: int
    patience_steps: int


@dataclass(frozen=True)
class CopyPace:
    """When a copy moves its bytes: at once (``early``) or at the end. It is done ``num_steps`` after its issue."""

    early: bool
    num_steps: int


@dataclass(frozen=True)
class Workload:
    """Clients, and the instance that serves them: its pools, its policy, and the times of its iterations and copies."""

    clients: tuple[Client, ...]
    num_spare_blocks: int
    max_batch_tokens: int
    tpot_target_s: float
    durations_s: tuple[float, ...]
    policy: str
    swap_mode: SwapMode
    num_host_blocks: int
    copies: tuple[CopyPace, ...]

    @property
    def specs(self) -> list[RequestSpec]:
        return [
            RequestSpec(f"r{index}", client.prompt, client.sampling, cache_salt=client.cache_salt)
            for index, client in enumerate(self.clients)
        ]

    @property
    def num_blocks(self) -> int:
        """Little more than the largest request needs, so that requests are preempted and cached blocks evicted."""
        most = max(len(client.prompt) + client.sampling.max_tokens for client in self.clients)
        return -(-most // TOKENS_PER_BLOCK) + self.num_spare_blocks


PROMPTS = st.builds(
    lambda stem, num_shared, rest: (*stem[:num_shared], *rest),
    st.sampled_from(STEMS),
    st.sampled_from([0, TOKENS_PER_BLOCK, 20, 5 * TOKENS_PER_BLOCK, len(STEMS[0])]),
    st.sampled_from([(7,), (7,) * TOKENS_PER_BLOCK])
    | st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20).map(tuple),
)
SAMPLINGS = st.builds(
    SamplingParams,
    seed=st.integers(0, 3),
    max_tokens=st.sampled_from([1, 8, 30]),
    temperature=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    top_logprobs=st.just(2),
)
CLIENTS = st.builds(
    Client,
    PROMPTS,
    SAMPLINGS,
    st.sampled_from(["", "", "tenant"]),
    st.integers(0, 12),
    st.sampled_from([*[10**6] * 5, 3]),
)
WORKLOADS = st.builds(
    Workload,
    st.lists(CLIENTS, min_size=4, max_size=10).map(tuple),
    num_spare_blocks=st.integers(0, 6),
    max_batch_tokens=st.sampled_from([3, 16, 50, 200]),
    tpot_target_s=st.sampled_from([0.01, float("inf")]),
    durations_s=st.lists(st.floats(1e-4, 0.1), min_size=1, max_size=8).map(tuple),
    policy=st.sampled_from(["skip_join_mlfq", "fcfs"]),
    swap_mode=st.sampled_from(SwapMode),
    num_host_blocks=st.sampled_from([0, 3, NUM_HOST_BLOCKS, NUM_HOST_BLOCKS]),
    copies=st.lists(st.builds(CopyPace, st.booleans(), st.integers(0, 4)), min_size=1, max_size=5).map(tuple),
)


BUSY = Workload(
    tuple(
        Client(
            (*STEMS[number % 2][: 8 * (1 + number % 3)], *range(number)),
            SamplingParams(seed=number, max_tokens=20, temperature=number % 2, top_logprobs=2),
            cache_salt="",
            asks_at_step=number,
            patience_steps=3 if number == 4 else 10**6,
        )
        for number in range(10)
    ),
    num_spare_blocks=4,
    max_batch_tokens=16,
    tpot_target_s=float("inf"),
    durations_s=(0.01,),
    policy="skip_join_mlfq",
    swap_mode=SwapMode.PROACTIVE,
    num_host_blocks=NUM_HOST_BLOCKS,
    copies=(CopyPace(early=False, num_steps=2), CopyPace(early=True, num_steps=1), CopyPace(early=False, num_steps=0)),
)
"""A workload that preempts, swaps, finds cached blocks and loses a client."""


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
        self.outbox: list[tuple[Peer, Message]] = []  # messages to other instances, and hand-overs to the gateway
        self.fetches: list[Copy] = []
        self._engine = engine
        self._transfer = transfer
        self._commands: deque[Effect] = deque()
        self._copies: deque[Copy] = deque()  # in the order of issue, in which they are done
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
                    rows = zip(tokens.request_ids, tokens.token_ids, logprobs, strict=True)
                    for request_id, token_id, logprob in rows:
                        self.answers.setdefault(request_id, []).append((token_id, logprob))
                case Send(message=Finished(request_id=request_id, reason=reason)):
                    assert reason is FinishReason.LENGTH
                    self.ended.add(request_id)
                case Send(to=to, message=sent) if to != GATEWAY or isinstance(sent, HandOver):
                    self.outbox.append((to, sent))
                case AddToEngine() | DropFromEngine() | RunStep():
                    self._commands.append(effect)
                case SwapOut() | SwapIn():
                    self._copies.append(Copy(effect, next(self._paces)))
                case Fetch():
                    self.fetches.append(Copy(effect, next(self._paces)))

    def step(self, duration_s: float) -> None:
        """Perform the engine's effects up to the end of the iteration in flight, which takes ``duration_s``, and the
        copies that are due. If no iteration is in flight, complete the next copy.
        """
        for copy in self._copies:
            if not copy.pace.early and not copy.is_made:
                break  # later copies wait for this one
            self._make(copy)
        self._now += duration_s
        is_idle = True
        while self._commands and is_idle:
            match self._commands.popleft():
                case AddToEngine(request=request):
                    self._engine.add(request)
                case DropFromEngine(request_id=request_id):
                    self._engine.drop(request_id)
                case RunStep(plan=plan):
                    done = replace(self._engine.step(plan), duration_s=duration_s)
                    is_idle = False
        for copy in self._copies:
            copy.num_steps += 1
        while self._copies and (is_idle or self._copies[0].num_steps > self._copies[0].pace.num_steps):
            copy = self._copies.popleft()
            self._make(copy)
            self.tell(CopyDone(copy.effect.copy_id, duration_s=1e-4))
            if is_idle:
                return
        if not is_idle:
            self.tell(done)

    def fetch(self) -> int:
        """Perform the fetches that are due, and report the completed ones. Returns how many blocks were already here
        and not copied.
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


def play(engine: Engine, workload: Workload, seen: Counter[object]) -> Instance:
    """Serve the workload, and count its events (preemptions, swaps, prefix hits) in ``seen``."""
    names = ("num_blocks", "num_host_blocks", "max_batch_tokens", "tpot_target_s", "swap_mode")
    changes = {name: getattr(workload, name) for name in names}
    instance = Instance(config(engine, prefix_cache=True, **changes), engine, workload.policy, workload.copies)
    left: set[str] = set()
    step = 0
    last_step = max(client.asks_at_step for client in workload.clients)
    while step <= last_step or instance.state.requests or instance.is_copying:
        for client, spec in zip(workload.clients, workload.specs, strict=True):
            if client.asks_at_step == step:
                instance.tell(Start(1, spec))
            if client.asks_at_step + client.patience_steps == step and spec.request_id not in instance.ended:
                instance.tell(Release(spec.request_id, 1))
                left.add(spec.request_id)
        instance.step(workload.durations_s[step % len(workload.durations_s)])
        step += 1
        assert step < MAX_STEPS, "the instance makes no progress"
    assert instance.ended | left == {spec.request_id for spec in workload.specs}
    assert instance.state.memory.device.num_free_blocks == workload.num_blocks
    assert instance.state.memory.host.num_free_blocks == workload.num_host_blocks
    seen["preemptions"] += instance.state.batcher.num_preemptions
    seen["tokens found"] += instance.state.memory.prefixes.num_tokens_found
    seen["left"] += len(left)
    seen["swap outs", workload.swap_mode] += instance.state.memory.num_swap_outs
    return instance


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_scheduling_changes_no_token(make_model: Any, dtype: str) -> None:
    """Arrivals, chunks, preemptions, swaps and prefix hits do not change a request's tokens and log-probabilities."""
    engine = TorchEngine(
        make_model(vocab_size=VOCAB_SIZE).description,
        EngineOptions(
            dtype=dtype,
            tokens_per_block=TOKENS_PER_BLOCK,
            kv_cache_bytes=4 * 2**20,
            host_kv_bytes=NUM_HOST_BLOCKS * TOKENS_PER_BLOCK * 256,  # a token's KV in float32; others need half of it
        ),
    )
    alone: dict[RequestSpec, Answer] = {}
    seen: Counter[object] = Counter()

    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @example(BUSY)
    @example(replace(BUSY, swap_mode=SwapMode.REACTIVE))
    @given(WORKLOADS)
    def same(workload: Workload) -> None:
        instance = play(engine, workload, seen)
        for spec in workload.specs:
            key = replace(spec, request_id="alone", cache_salt="")
            if key not in alone:
                alone[key] = answer_alone(engine, key)
            answer = instance.answers.get(spec.request_id, [])
            assert answer == alone[key][: len(answer)]
            if spec.request_id in instance.ended:
                assert len(answer) == spec.sampling.max_tokens

    same()
    swaps = [("swap outs", mode) for mode in (SwapMode.PROACTIVE, SwapMode.REACTIVE)]
    assert all(seen[what] > 0 for what in ("preemptions", "tokens found", "left", *swaps)), seen
    assert not seen["swap outs", SwapMode.RECOMPUTE]
